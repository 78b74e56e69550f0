"""Stands in for a module of SGLang that its kernels import."""


def is_arch_support_pdl():
    return False
