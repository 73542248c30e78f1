import compileall
import gc
import os
import resource
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, which an engine fills with zeros

import pytest

REPO = Path(__file__).resolve().parent.parent


def pytest_configure(config):
    """Programs that tests start find bytecode where PYTHONDONTWRITEBYTECODE would have each compile its own. Those of
    units are forked from a process without vLLM, which none of them starts."""
    if not hasattr(config, "workerinput"):  # a worker's, of which there are several
        share = tempfile.TemporaryDirectory(prefix="tests-")  # what they have in common: tests/programs.py
        config.add_cleanup(share.cleanup)
        os.environ["TESTS_SHARE"] = share.name
        compileall.compile_dir(REPO, maxlevels=0, quiet=2)
        compileall.compile_dir(REPO / "scripts", quiet=2)
    if "not runs" in config.option.markexpr:
        os.environ["TESTS_OF_UNITS"] = "1"


@pytest.fixture(autouse=True)
def address_space():
    """A test that does in its own process what a worker does limits its address space, as workers do. Later tests of
    the process must not inherit that: a browser ends at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(autouse=True)
def nothing_asks_for_the_end():
    utils = sys.modules.get("utils")
    if utils is not None:
        utils.STOP.because = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports make objects that stay: each process would spend 2 s on looking for garbage among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Files whose tests are of the repository and not of the code: a right edit may make them fail. And of rare ways to run,
# or of what an idea does not touch
NAMES = "audit bench compiled data_scripts doctor estimate eval forks hub hub_files interop liveness network parts pins"
NAMES += " prepared quarter readme recipes sandbox style together zoo"
HOUSE = {f"test_{name}.py" for name in NAMES.split()}


def pytest_collection_modifyitems(items):
    """What is in tests/runs/ is marked so, and the house's files; elsewhere a test that starts a run, or is of the
    house, says so itself."""
    for item in items:
        if item.path.parent.name == "runs":
            item.add_marker("runs")
        if item.path.name in HOUSE or item.path.parent.name == "gpu_contract":
            item.add_marker("house")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Function (arch, tied) -> directory of a tiny random model, made once per session."""
    from scripts.data.make_tiny_model import make_tiny_model

    made = {}

    def get(arch: str = "llama", tied: bool = True) -> Path:
        if (arch, tied) not in made:
            directory = tmp_path_factory.mktemp("models") / f"{arch}_{'tied' if tied else 'untied'}"
            made[arch, tied] = make_tiny_model(directory, arch=arch, tied=tied, seed=0)
        return made[arch, tied]

    return get


@pytest.fixture(scope="session")
def world():
    """A world of one in this process."""
    import utils

    before = set(os.environ)
    made = utils.init_distributed()
    for name in set(os.environ) - before:  # RANK and the like, which scripts that tests start would take for theirs
        del os.environ[name]
    return made


@pytest.fixture(scope="module")
def measured_once():
    """A processor's speed, of which each dry run tells, takes 0.1 s to see."""
    import torch

    from scripts.parts import plan

    speeds = plan.core_speeds([torch.bfloat16, torch.float32])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "core_speeds", lambda dtypes: speeds)
        yield
