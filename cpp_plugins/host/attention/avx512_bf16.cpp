#define DDTREE_ISA avx512_bf16
#include "attention/kernel.inl"
#include "delta/kernel.inl"
#include "product/kernel.inl"
