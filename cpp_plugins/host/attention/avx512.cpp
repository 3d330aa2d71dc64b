#define DDTREE_ISA avx512
#include "attention/kernel.inl"
#include "delta/kernel.inl"
#include "product/kernel.inl"
