"""What SGLang's plugin loader calls (entry point group "sglang.srt.plugins").

SGLang logs the exceptions of plugins and goes on, so a broken plugin would leave its own Inkling to
serve. Therefore the architecture's names are taken first, by classes that refuse to be built; only
then is the plugin installed, which replaces them.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

ARCHITECTURES = (
    "InklingForConditionalGeneration",
    "InklingForConditionalGenerationMTP",
)


def register() -> None:
    """Make SGLang serve Inkling with this package's model, or with an error that says why not."""
    from sglang.srt.models.registry import ModelRegistry

    _guard(ModelRegistry, "its registration did not finish")
    try:
        from inkling_rocm.sglang_plugin.install import install

        install()
    except Exception as error:
        # Whatever it was: the guard must carry the reason, and SGLang must not serve without us.
        _guard(ModelRegistry, f"{type(error).__name__}: {error}")
        raise
    logger.info("inkling-rocm: Inkling architectures are served by this plugin")


def _guard(registry, reason: str) -> None:
    for name in ARCHITECTURES:
        registry.models[name] = _refusing(name, reason)


def _refusing(name: str, reason: str) -> type:
    """A model class that ends the server when it is built."""

    def refuse(self, *args, **kwargs):
        raise RuntimeError(
            f"inkling-rocm is installed but cannot serve {name} ({reason}). SGLang's own Inkling "
            "would serve instead, so the server stops here; `inkling-rocm doctor --engine sglang` "
            "says what to do. To run SGLang's own on purpose, leave inkling_rocm out of "
            "SGLANG_PLUGINS."
        )

    return type(name, (), {"__init__": refuse, "refusal": reason})
