"""The arms of a study: flags, a fork's diff, or a git branch, each run in a copy of the code of its own.

    base                                              the study's own flags
    "sapo@scripts/forks/sapo.diff: --loss_fn sapo"    with a diff applied
    "mine@my-branch"                                  with what a branch changes
    "async4: grpo_fast.py --async_steps 4"            another script

A copy holds the files of the study's commit, not of the working tree, so that a row can be made again later.
"""

import functools
import hashlib
import io
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.parts import translate

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("grpo.py", "grpo_fast.py")
LINKED = ("models", "data")  # of the checkout, in each copy
# flags that study.py gives itself, and flags that are the same for all arms
OF_THE_STUDY = """dataset_mixer_list dataset_mixer_list_splits dataset_mixer_eval_list dataset_mixer_eval_list_splits
    seed exp_name output_dir overwrite resume dry_run local_eval_every eval_on_step_0 total_episodes""".split()
OF_ALL_ARMS = """model_name_or_path model_revision shuffle chat_template_name add_bos system_prompt_override_file
    eval_pass_at_k eval_temperature eval_response_length response_length""".split()
FIXED = (*OF_THE_STUDY, *OF_ALL_ARMS)
# The endpoint of a game is the score of its training rollouts, so what the score is made of and how they are sampled is
# fixed there
OF_THE_SCORE = """env_file max_steps per_turn_max_tokens temperature vllm_top_p stop_strings apply_verifiable_reward
    verification_reward apply_r1_style_format_reward r1_style_format_reward additive_format_reward non_stop_penalty
    non_stop_penalty_value overlong_buffer_length kl_in_reward""".split()
# A diff and a copy are the same whatever the user's settings of git are
GIT = "git -c core.quotePath=false -c core.autocrlf=false".split()
GIT_DIFF = """diff --no-ext-diff --no-textconv --no-color --binary --full-index --unified=3 -O/dev/null --src-prefix=a/
    --dst-prefix=b/""".split()
GIT_APPLY = "apply --whitespace=nowarn -".split()
ONLY_FAST = "vllm_num_engines vllm_tensor_parallel_size async_steps inflight_updates num_learners_per_node".split()
MOST_FILES_TOLD = 4
CHANGED_FILE = re.compile(r"^\+\+\+ (?!/dev/null)(?:b/)?(\S.*?)\t?$", re.MULTILINE)  # of a diff


class ArmError(ValueError):
    """An arm cannot be run or compared; the message says why and what to do."""


FORMS = "write NAME, NAME: --FLAGS, NAME@FILE.diff: --FLAGS or NAME@BRANCH: --FLAGS. A name has no / and no space"
LEARNED = "learned"  # the verifier that the rows to train on name: see scripts/data/make_tasks.py


@dataclass(frozen=True)
class Arm:
    """What differs from the study's base."""

    name: str
    diff: str = ""  # against the study's commit; its text, so that the record has all of it
    script: str = "grpo.py"
    flags: tuple[str, ...] = ()

    @property
    def diff_hash(self) -> str:
        """SHA-256 of the diff, or "" without one."""
        text = self.diff.encode(errors="surrogateescape")  # a branch may have files of another encoding
        return hashlib.sha256(text).hexdigest() if text else ""


def git(*arguments: str) -> bytes:
    """What git prints about this checkout. Raises ArmError with git's words."""
    done = subprocess.run([*GIT, "-C", str(ROOT), *arguments], capture_output=True)
    if done.returncode:
        raise ArmError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def parse_arm(text: str, commit: str) -> Arm:
    """An arm as it is written on the command line: NAME[@DIFF or @BRANCH][: [SCRIPT] FLAGS]. Raises ArmError."""
    head, _, tail = text.partition(":")
    name, _, source = head.strip().partition("@")
    try:
        words = shlex.split(tail)
    except ValueError as error:
        raise ArmError(f"arm {text!r}: {error}") from None
    script = "grpo.py"
    if words and words[0] in SCRIPTS:
        script = words.pop(0)
    if words and not words[0].startswith("--") or " " in head.strip():
        raise ArmError(f"arm {text!r}: {FORMS}")
    check_arm(name, words)
    arm = Arm(name, read_diff(name, source, commit), script, tuple(words))
    check_script(arm)
    return arm


def check_arm(name: str, words: Sequence[str]) -> None:
    """Raises ArmError for a name or flags that an arm cannot have: flags that are the same for all arms, files that
    others do not have, and a change of the verifier that judges the held-out rows."""
    if not name or "/" in name:
        raise ArmError(f"arm {name!r}: {FORMS}")
    check_flags(f"arm {name}", words, FIXED)


def check_flags(whose: str, words: Sequence[str], fixed: Collection[str]) -> None:
    """Raises ArmError for flags that are fixed, files that others do not have, and another judge of held-out rows.
    `whose` flags they are begins the message."""
    for flag, values in flags_of(words):
        not_free = sorted(meanings(flag) & set(fixed))
        if not_free:
            raise ArmError(f"{whose}: --{flag}: --{not_free[0]} is the same for all arms of a study")
        for value in values:
            if is_elsewhere(value):
                raise ArmError(
                    f"{whose}: --{flag} {value} is a file that others do not have, so they could not make its rows "
                    "again. Commit it on the arm's branch, or add it to its diff, and name it from the root of the code"
                )
        if flag == "remap_verifier":
            for pair in ",".join(values).split(","):
                if pair.partition("=")[0] != LEARNED:
                    raise ArmError(
                        f"{whose}: --remap_verifier {pair} changes how held-out rows are judged, the same for all "
                        f"arms: write {LEARNED}=VERIFIER, which changes the rows that are trained on"
                    )


def check_script(arm: Arm) -> None:
    """Raises ArmError for an arm of grpo.py whose flags or whose code only grpo_fast.py acts on: it would be the base
    by another name."""
    if arm.script != "grpo.py":
        return
    fix = f'write "{arm.name}: grpo_fast.py --FLAGS", with @ and its source after the name'
    for flag, _ in flags_of(arm.flags):
        if meanings(flag) & set(ONLY_FAST):
            raise ArmError(f"arm {arm.name}: --{flag} does nothing in grpo.py: {fix}")
    if code_of(arm.diff) == {"grpo_fast.py"}:
        raise ArmError(f"arm {arm.name}: it changes grpo_fast.py alone, and runs grpo.py: {fix}")


def code_of(diff: str) -> set[str]:
    """The Python files that a diff changes or adds, without tests."""
    paths = set()
    for path in CHANGED_FILE.findall(diff):
        if path.endswith(".py") and not path.startswith("tests/"):
            paths.add(path)
    return paths


def size_of(diff: str) -> str:
    """What a diff changes, in words: its files and lines."""
    files = CHANGED_FILE.findall(diff)
    lines = diff.splitlines()
    added = sum(line.startswith("+") and not line.startswith("+++ ") for line in lines)
    removed = sum(line.startswith("-") and not line.startswith("--- ") for line in lines)
    shown = ", ".join(files[:MOST_FILES_TOLD])
    if len(files) > MOST_FILES_TOLD:
        shown = f"{len(files)} files"
    return f"{shown}: {added:,} lines more, {removed:,} less"


def check_games(arm: Arm, games: Sequence[str]) -> None:
    """Raises ArmError for an arm that changes how these games are scored or sampled: the score is the endpoint."""
    for flag, _ in flags_of(arm.flags):
        if games and meanings(flag) & set(OF_THE_SCORE):
            names = ", ".join(games)
            raise ArmError(f"arm {arm.name}: --{flag} changes the score of {names}, and arms are compared by it")


def check_twins(arms: Sequence[Arm]) -> None:
    """Raises ArmError for two arms with the same code and flags."""
    seen: dict[tuple[Any, ...], str] = {}
    for arm in arms:
        twin = seen.setdefault((arm.diff, arm.script, arm.flags), arm.name)
        if twin != arm.name:
            raise ArmError(
                f"arms {twin} and {arm.name} have the same code and flags. An arm's name alone means one that is in "
                f"--out; for a new one {FORMS}"
            )


@functools.cache
def aliases() -> Mapping[str, frozenset[str]]:
    """open-instruct's names of our flags: each with what it is here."""
    names: dict[str, frozenset[str]] = {}
    for flag, (kind, words) in translate.read_table().items():
        if kind != "alias":
            continue
        theirs, _, _ = flag.partition("=")
        ours = {name_of(word) for word in words.split() if word.startswith("--")}
        names[theirs] = names.get(theirs, frozenset()) | ours
    return names


def meanings(flag: str) -> frozenset[str]:
    """A flag's name, and what it is here if it is one of open-instruct's."""
    return aliases().get(flag, frozenset()) | {flag}


def is_elsewhere(value: str) -> bool:
    """Whether the value of a flag is a file that is not of the code: one of this machine, or one in a folder that git
    does not have."""
    if os.path.isabs(value):
        return os.path.isfile(value)
    folders = value.split("/")
    is_linked = folders[0] in LINKED and value.endswith(".py")
    return is_linked or folders[0] == "~" or ".." in folders


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The flags of some words, each with its values."""
    merged = merge_flags((), tuple(words))
    flag = ""
    values: list[str] = []
    for word in merged:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag:
            yield flag, values
        flag = name_of(word)
        _, has_value, value = word.partition("=")
        values = [value] if has_value else []
    if flag:
        yield flag, values


def read_diff(name: str, source: str, commit: str) -> str:
    """The text of a diff file, or of what a branch changes since it left the study's commit. Raises ArmError for a file
    or branch that is not there, and for a branch without a change."""
    if not source:
        return ""
    if source.endswith(".diff"):
        places = [Path(source), ROOT / source]
        for path in filter(Path.is_file, places):
            text = path.read_text(errors="surrogateescape")
            if not text:
                raise ArmError(f"arm {name}: {path} is empty")
            return text
        raise ArmError(f"arm {name}: no file {places[0].resolve()}")
    try:
        git("rev-parse", "--verify", "--quiet", f"{source}^{{commit}}")
    except ArmError:
        raise ArmError(f"arm {name}: no branch {source}; the name of a file with a diff ends in .diff") from None
    check_fork(name, source, commit)
    diff = git(*GIT_DIFF, f"{commit}...{source}").decode(errors="surrogateescape")
    if not diff:
        raise ArmError(
            f"arm {name}: {source} changes nothing of the study's commit {commit[:12]}, which was HEAD when the study "
            "began. Begin it on the code without the idea: git switch main"
        )
    return diff


def check_fork(name: str, branch: str, commit: str) -> None:
    """Raises ArmError for a branch that left the code that is checked out after the study's commit: the commits in
    between would be in this arm alone."""
    tip = git("rev-parse", f"{branch}^{{commit}}").decode().strip()
    try:
        fork = git("merge-base", "HEAD", branch).decode().strip()
    except ArmError:  # they have no commit in common
        return
    if fork == tip:  # the branch itself is checked out
        return
    between = git("rev-list", "--count", f"{commit}..{fork}").decode().strip()
    if between != "0":
        short = commit[:12]
        raise ArmError(
            f"arm {name}: {branch} has {between} commits after the study's, {short}, that are not its own (HEAD has "
            f"them too): they would be in this arm alone. git rebase --onto {short} {fork[:12]} {branch}, or begin a "
            "study of today's code with another --out"
        )


def make_copy(arm: Arm, commit: str, folder: Path) -> Path:
    """The code of an arm in a folder of its own, made once for each diff. Raises ArmError for a diff that does not
    apply."""
    copy = folder / (arm.diff_hash[:12] or "base")
    if (copy / "made").exists():
        return copy
    copy.mkdir(parents=True, exist_ok=True)
    try:
        archive = git("archive", commit)
    except ArmError:
        raise ArmError(
            f"this checkout has no commit {commit}, whose code the study is of: git fetch the branch that has it"
        ) from None
    tarfile.open(fileobj=io.BytesIO(archive)).extractall(copy, filter="data")
    if arm.diff:
        # inside of a checkout git would take the diff's paths as that checkout's
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve())}
        command = [*GIT, *GIT_APPLY]
        text = arm.diff.encode(errors="surrogateescape")
        done = subprocess.run(command, cwd=copy, input=text, capture_output=True, env=environment)
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()
            raise ArmError(
                f"arm {arm.name}: its diff does not apply to the study's commit {commit[:12]}: {words}. Make it there "
                f"(git switch -c NAME {commit[:12]}), or begin a study of today's code with another --out"
            )
    for name in LINKED:
        if (ROOT / name).exists() and not (copy / name).exists():
            (copy / name).symlink_to(ROOT / name)
    (copy / "made").touch()
    return copy


def code_hash(folder: Path) -> str:
    """SHA-256 of what trains: the four files and the parts."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("scripts/parts/*.py")]):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def hashes_of_files(folder: Path, flags: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the Python files of a copy that a run's flags name, as --reward_file and --env_file do: the code hash
    has the four files and the parts alone."""
    hashes = {}
    for word in flags:
        path = folder / word.rpartition("=")[2]
        if word.endswith(".py") and path.is_file() and path.is_relative_to(folder):
            hashes[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def name_of(word: str) -> str:
    """The flag of a word, as tyro takes it: --no_x, --x=1 and --x-y too."""
    return word.removeprefix("--").partition("=")[0].replace("-", "_").removeprefix("no_")


def merge_flags(base: tuple[str, ...], own: tuple[str, ...]) -> list[str]:
    """The base's flags, then the arm's. Of a flag that is given twice, --no_x and --x being one flag, the last counts,
    with its values. Raises ArmError for a value that belongs to no flag."""
    merged: dict[str, list[str]] = {}  # flag -> its words
    name = ""
    for word in (*base, *own):
        if word.startswith("--"):
            name = name_of(word)
            merged.pop(name, None)
            merged[name] = [word]
        elif not name:
            raise ArmError(f"{word!r} belongs to no flag")
        else:
            merged[name].append(word)
    return [word for words in merged.values() for word in words]
