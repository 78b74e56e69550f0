"""`inkling-rocm doctor --engine sglang`: would SGLang serve our model here, and if not, why."""

from __future__ import annotations

import json
import subprocess
import sys

# Importing every model of SGLang takes most of it.
PROBE_SECONDS = 300


def sglang_lines() -> tuple[list[str], list[str]]:
    """(lines to print, what keeps SGLang from serving our model)."""
    command = [sys.executable, "-m", "inkling_rocm.cli.sglang_probe"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        problem = f"SGLang did not load its models within {PROBE_SECONDS} s"
        return [f"sglang        {problem}"], [problem]
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"SGLang cannot be imported ({reason})"
        return [f"sglang        {problem}"], [problem]
    return judge(json.loads(run.stdout.splitlines()[-1]))


def judge(found: dict) -> tuple[list[str], list[str]]:
    """Lines and problems from `sglang_probe.probe`'s answer."""
    if found["sglang"] is None:
        problem = "sglang is not installed: use an image of docker/, or pip install sglang"
        return [f"sglang        {problem}"], [problem]
    lines = [f"sglang        {found['sglang']}, plugin made for {found['pinned'] or 'unknown'}"]
    lines += [
        f"cutlass-dsl   {found['cutlass'] or 'missing'}: not needed by our model"
        + ("" if found["cutlass"] else "; SGLang's own Inkling cannot be imported without it")
    ]
    problems = []
    # A local part (0.5.23+rocm720) says how the image built it.
    if found["pinned"] is None:
        problems.append(
            "inkling-rocm is not installed by pip: SGLang finds plugins by their metadata"
        )
    elif found["sglang"].split("+")[0] != found["pinned"]:
        problems.append(f"sglang is {found['sglang']}, wanted {found['pinned']}")
    lines.append(f"plugin        {_plugin(found)}")
    lines += [f"              SGLang logged: {error}" for error in found["errors"]]
    model = found["model"]
    lines.append(f"model         {model or 'none registered'}")
    if found["refusal"] is not None:
        problems.append(f"the plugin failed, a server would stop: {found['refusal']}")
    elif not (model or "").startswith("inkling_rocm."):
        owner = f"SGLang would serve {model}" if model else "SGLang has no Inkling to serve"
        problems.append(f"the plugin is not active: {owner}")
    return lines, problems


def _plugin(found: dict) -> str:
    """How our package comes to be loaded, or why it does not."""
    if found["external"].startswith("inkling_rocm"):
        return f"selected by SGLANG_EXTERNAL_MODEL_PACKAGE={found['external']}"
    if not found["plugins"]:
        return "no entry point of inkling-rocm: install it with pip"
    allowed = [name.strip() for name in found["allowed"].split(",") if name.strip()]
    left_out = [name for name in found["plugins"] if allowed and name not in allowed]
    if left_out:
        return f"left out by SGLANG_PLUGINS={found['allowed']}: add {', '.join(left_out)}"
    return f"entry point {', '.join(found['plugins'])}"
