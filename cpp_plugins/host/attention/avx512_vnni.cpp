#define DDTREE_ISA avx512_vnni
#include "attention/kernel.inl"
#include "delta/kernel.inl"
#include "product/kernel.inl"
