#define DDTREE_ISA avx2
#include "attention/kernel.inl"
#include "delta/kernel.inl"
#include "product/kernel.inl"
