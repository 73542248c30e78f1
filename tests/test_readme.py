"""The READMEs say what the code does: commands parse, links and names exist."""

import inspect
import re
import shlex

import pytest

import grpo
import utils
from scripts.data.make_largest import make_largest
from scripts.data.make_tasks import make_task
from scripts.parts import checks
from scripts.reports import metrics
from tests.conftest import REPO

PATHS = [REPO / "README.md", *sorted(REPO.glob("scripts/**/*.md")), REPO / "tests" / "README.md"]
PAGES = {str(path.relative_to(REPO)): path.read_text() for path in PATHS}
README, ALL = PAGES["README.md"], "\n".join(PAGES.values())


def lines():
    """Every line of the bash blocks, continued lines joined, arrays of flags in the places where they are used."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", ALL, re.DOTALL)).replace("\\\n", " ")
    for name, flags in re.findall(r"^(\w+)=\((.*)\)$", blocks, re.MULTILINE):
        blocks = blocks.replace(f"{name}=({flags})", "").replace(f'"${{{name}[@]}}"', flags)
    return [line for line in blocks.splitlines() if line.strip() and not line.startswith("#")]


def commands():
    started = [line for line in lines() if re.search(r" grpo(_fast)?\.py +--", line)]
    return [line for line in started if "study.py" not in line]  # whose arms have a few flags


@pytest.mark.parametrize("line", commands())
def test_commands_pass_every_check(line, tmp_path, monkeypatch):
    make_largest(tmp_path / "data" / "largest")  # what the line before it in the README makes
    make_task("largest_digit", tmp_path / "data" / "tasks")
    (tmp_path / "rows.jsonl").write_text(README.split("```json\n")[1].split("```")[0])
    (tmp_path / "my_reward.py").write_text(README.split("```python\n")[1].split("```")[0])
    (tmp_path / "scripts").symlink_to(REPO / "scripts")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.sub(r"(--\w+)=", r"\1 ", line), comments=True)

    def number(flag):
        return int(words[words.index(flag) + 1]) if flag in words else 1

    script = next(w for w in words if w.startswith("grpo"))
    args = utils.parse_args(grpo.Args, words[words.index(script) + 1 :])
    ranks, a_node = number("--nnodes") * number("--nproc_per_node"), number("--nproc_per_node")
    args = args.beside_engine(script == "grpo.py" or args.single_gpu_mode)  # as both scripts begin
    args.check(ranks if script == "grpo.py" else 1, fast=script == "grpo_fast.py")
    if script == "grpo_fast.py":
        checks.check_fast(args, ranks if words[0] == "torchrun" else None, a_node)
    else:  # what Args.check asks for where there is a GPU: learner and engine share it
        assert args.vllm_gpu_memory_utilization <= 0.8 or args.rollout_backend != "vllm"


FLAGS = "".join(map(inspect.getsource, grpo.Args.__mro__[:-1]))
OTHERS = (
    r"source scripts/setup\.sh|git switch (?:-c \w+|main)|git apply scripts/forks/\w+\.diff|cp grpo\.py my_grpo\.py"
    r"|(?:python|torchrun) grpo(?:_fast)?\.py \.\.\. "
)


@pytest.mark.parametrize("line", [line for line in lines() if line not in commands()])
def test_every_other_line_names_a_script_and_flags_that_exist(line):
    words = shlex.split(line, comments=True)
    flags = [w for w in words[1:] if w.startswith("--") and " " not in w]
    source = FLAGS
    if not re.match(OTHERS, line):
        path = REPO / next(w for w in words[1:] if not w.startswith("-"))
        assert path.exists() and words[0] == {".sh": "bash", ".py": "python"}[path.suffix], line
        source = path.read_text()
        source += FLAGS if '"$@"' in source or ", grpo.Args):" in source else ""
    for flag in flags:
        assert flag in source or f" {flag.removeprefix('--')}:" in source or flag == "--pdb", flag
    for quoted in [w for w in words[1:] if w.startswith("--") and " " in w]:  # flags of a run, the value of another
        own = [w.removeprefix("--") for w in quoted.split() if w.startswith("--")]
        assert all(f" {flag}:" in FLAGS for flag in own), quoted


def test_commands_of_the_claims_select_tests():
    """pytest -k takes any of its words that is in the name of a test, of its file or of a parameter."""
    claims = re.findall(r"`pytest (tests/[^`]*)`", ALL)
    assert len(claims) > 10
    for words in map(shlex.split, claims):
        files = [w for w in words if w.endswith(".py")]
        text = "".join((REPO / f).read_text() for f in files)
        names = " ".join([*re.findall(r"def (test_\w+)", text), *files]).lower()
        chosen = words[words.index("-k") + 1].split(" or ") if "-k" in words else ["test"]
        assert all(word.lower() in names for word in chosen), words


def test_every_file_and_function_named_exists():
    for name in re.findall(r"`((?:scripts|tests)/[\w./]+)`", ALL):
        assert (REPO / name).exists(), name
    picture = README.split("## The algorithm")[1].split("```")[1]
    names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b|\b(?:update|trainable|aggregate)\b", picture))
    ours = names - {"load_weights", "pi_old", "r_i", "a_i"}
    assert len(ours) > 10 and [name for name in ours if not hasattr(grpo, name)] == []


def anchors(text):  # those that GitHub gives to the headings of a page
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", PAGES[page])
    assert links or page != "README.md"
    for link in links:
        name, _, anchor = link.partition("#")
        target = (REPO / page).parent / name if name else REPO / page
        assert name.startswith("https://") or target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_program_and_every_part_has_a_row():
    programs, parts = (PAGES[f"scripts/{page}README.md"].split("\n## ")[0] for page in ("", "parts/"))
    for path in sorted(REPO.glob("scripts/**/*.py")):
        name = str(path.relative_to(REPO / "scripts"))
        if name.startswith("parts/"):
            assert f"`{path.name}`" in parts, name
        elif '__name__ == "__main__"' in path.read_text() and not name.startswith("train/"):
            assert f"`{name}`" in programs, name


def undocumented(keys):
    return [key for key in keys if metrics.define(key) is None]
