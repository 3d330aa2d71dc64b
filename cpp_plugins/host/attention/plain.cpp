#define DDTREE_ISA plain
#include "attention/kernel.inl"
#include "delta/kernel.inl"
#include "product/kernel.inl"
