"""Model classes by SGLang's names: what SGLANG_EXTERNAL_MODEL_PACKAGE may point to."""
