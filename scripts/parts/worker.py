"""A worker of rewards.py: a process in which libraries that may hang, crash or exhaust memory meet text of the model.

rewards.py starts it with a socket as standard input, which carries a job as a line of JSON, and kills it at the job's
deadline. By hand it says what the verifier math takes for equal, beside plain math-verify and equality as texts:

    python scripts/parts/worker.py tests/math_pairs.jsonl  # rows {label, answer, equal}: errors of each, and which

Here is also what the equality of mathematical answers is: `same`, math-verify with what it lacks around it.
"""

import ast
import base64
import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import pickle
import re
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import rewards

# ----------------------------------------------------------------------------------------------------------------------
# Equality of answers

# measure, then sizes with their names, singular. A unit that is not here is a measure of its own.
MEASURES = """
length 1 mm millimeter millimetre, 10 cm centimeter centimetre, 100 dm, 1000 m meter metre, 1000000 km kilometer
kilometre, 25.4 in inch inche, 304.8 ft foot feet, 914.4 yd yard, 1609344 mi mile; mass 1 mg milligram, 1000 g gram,
1000000 kg kilogram; time 1 s sec second, 60 min minute, 3600 h hr hour, 86400 day, 604800 week; volume 1 ml milliliter
millilitre, 10 cl, 1000 l L liter litre; money 1 cent ¢, 100 $ dollar usd; share 1/100 % percent; angle 1 ° degree deg;
speed 1 m/s, 5/18 km/h kph, 0.44704 mph
"""
UNITS: dict[str, tuple[str, Fraction]] = {}
for _line in MEASURES.split(";"):
    _measure, _, _sizes = _line.strip().partition(" ")
    for _size, *_names in map(str.split, _sizes.split(",")):
        UNITS |= {name: (_measure, Fraction(_size)) for name in _names}

SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen""".split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = {word: n for n, word in enumerate(SMALL)} | {word: 10 * n for n, word in enumerate(TENS) if n > 1}


def number_in_words(text: str) -> int | None:
    """21 for twenty-one; None for what is no number in words below a billion."""
    total = part = 0
    words = re.split(r"[\s-]+|\band\b", text.lower().strip())
    for word in filter(None, words):
        if word in WORDS:
            part += WORDS[word]
        elif word == "hundred":
            part = (part or 1) * 100
        elif word in ("thousand", "million"):
            total, part = total + (part or 1) * (1000 if word == "thousand" else 10**6), 0
        else:
            return None
    return total + part if any(words) else None


FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textrm|operatorname)\s*\{([^{}]*)\}")
SPACE = re.compile(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[,!;: ]|~|\\q?quad")  # not \\, which ends a row of a matrix
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?:\s\d{3})+)(?![\d,]|\s\d)")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{?(\d+)\}?")
MIXED = re.compile(r"(?<![\w^}{.)])(\d+)\s*(?:\\frac\{(\d+)\}\{(\d+)\}|(?<=\s)(\d+)/(\d+))(?![\w^])")
SCIENTIFIC = re.compile(
    r"(?<![\w.^{)])([-+]?\d+(?:\.\d+)?)\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))(?![\w.^])"
)
SET_OF = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{?R\}?\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}")
ANGLE = re.compile(r"(?<!\d)(\d+(?:\.\d+)?)\s*°")
UNIT_AT_END = re.compile(
    r"(.*?[\w})])\s+(?:(sq|cu)(?:uare|bic)?\.?\s+)?([a-zA-Z]{2,}|[mgshlL])\.?\s*(?:\^\s*\{?(\d)\}?)?"
)
TIME = re.compile(r"(\d{1,2}):(\d\d)(?: ([ap]m))?")
OR = re.compile(r"\s*(?:\\lor|\\vee|\\wedge|\\land|\b(?:or|and)\b|;)\s*")


def repeating(match: re.Match) -> str:
    """0.8333.. of 0.8\\overline{3}, as a fraction."""
    whole, digits, again = match[1] or "0", match[2], match[3]
    nines = 10 ** len(again) - 1
    value = Fraction(f"{whole}.{digits or 0}") + Fraction(int(again), nines * 10 ** len(digits))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def mixed(match: re.Match) -> str:
    whole, top, bottom = int(match[1]), int(match[2] or match[4]), int(match[3] or match[5])
    return f"\\frac{{{whole * bottom + top}}}{{{bottom}}}" if top < bottom else match[0]


def clean(tex: str) -> str:
    """The answer in one spelling: no invisible parts, fonts and spaces of TeX; numbers as digits or \\frac."""
    text = re.sub(r"\\[hv]?phantom\{[^{}]*\}", "", tex)
    text = SPACE.sub(" ", FONT.sub(r" \1 ", text)).replace("\\%", "%").replace("\\$", "$").replace("^\\circ", "°")
    text = text.replace("^{\\circ}", "°").replace("\\degree", "°").strip().rstrip(".").strip()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(
        r"\\frac\s*(?:(\d)|\{([^{}]*)\})\s*(?:(\d)|\{([^{}]*)\})",
        lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}",
        text,
    )
    text = OR.sub(",", text)
    if text[:1] not in "([{\\" or text.startswith("\\frac"):
        text = GROUPED.sub(lambda m: re.sub(r"[\s,]", "", m[0]), text)
    text = MIXED.sub(mixed, REPEATING.sub(repeating, text))
    text = re.sub(r"(?<![\w.^{])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])", lambda m: plain(Fraction(m[0])), text)
    text = SCIENTIFIC.sub(lambda m: plain(Fraction(m[1]) * Fraction(10) ** int(m[2] or m[3])), text)
    if match := SET_OF.fullmatch(text):
        text = match[1].strip()
    text = re.sub(r"(?<=\d)\s+(?=\d)", ",", text.removeprefix("\\approx").strip())
    text = re.sub(r"(?<=:\d\d)\s*([ap])\.?m\.?(?![a-z])", lambda m: f" {m[1].lower()}m", text, flags=re.IGNORECASE)
    words = number_in_words(re.sub(r"^(?:an?|the)\s", "", text))
    return str(words) if words is not None and re.search(r"[a-z]", text, re.IGNORECASE) else text


def plain(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
QUANTITY = re.compile(
    rf"(-?)\s*(\$?)\s*(?:(-?)\\frac\{{({NUMBER})\}}\{{({NUMBER})\}}|({NUMBER})(?:/({NUMBER}))?)"
    r"\s*(\$|%|¢|°|[a-zA-Z][a-zA-Z. /]*)?\s*(?:\^\{?(\d)\}?)?"
)


def quantity(text: str) -> tuple[Fraction, str] | None:
    """(value, unit or "") of a number with one unit at most, as clean spells it."""
    match = QUANTITY.fullmatch(text.strip())
    if match is None or any(len(part or "") > 60 for part in match.groups()):
        return None
    sign, dollar, sign2, top, bottom, value, below, unit, power = match.groups()
    if not unit and power or unit and len(unit.strip()) == 1 and unit.strip() not in UNITS:
        return None  # 2^3; 3x
    try:
        number = Fraction(top or value) / Fraction(bottom or below or 1)
    except ZeroDivisionError:
        return None
    unit = (unit or dollar).strip().lower().rstrip(".")
    if unit not in UNITS and unit.removesuffix("s") in UNITS:
        unit = unit.removesuffix("s")
    if unit and unit not in UNITS and not re.fullmatch(r"[a-z/ ]{2,}", unit):
        return None
    return (-number if bool(sign) != bool(sign2) else number), unit + (power or "")


def same_quantity(gold: tuple[Fraction, str], answer: tuple[Fraction, str]) -> bool:
    """Units, where both have one, must be equal, or of the same measure with the value converted. A label in % is met
    by the bare number as well, and one of 1 or more without a sign by that many %, as the MATH normalizer and
    math-verify have it: MATH's own labels of a share may lack the sign. Below 1, 0.5 and 0.5 % differ."""
    (x, unit), (y, other) = gold, answer
    (measure, size), (measure2, size2) = UNITS.get(unit, (unit, 1)), UNITS.get(other, (other, 1))
    if unit and other and unit != other:
        return measure == measure2 and x * size == y * size2
    if not unit and other in ("%", "percent"):
        return x == y / 100 or x == y and abs(x) >= 1
    if other == "" and unit in ("%", "percent") and x / 100 == y:
        return True
    return x == y


NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'*(?:\([a-z](?:,[a-z])*\))?")
UNORDERED = re.compile(r"\\\{.*,.*\\\}|(?!.*\\in(?![a-z]))[^()\[\]=]*,[^()\[\]=]*")
RELATION = re.compile(r"<|>|\\(?:le|ge|leq|geq|lt|gt|leqslant|geqslant)(?![a-zA-Z])|[≤≥]")


def solutions(text: str) -> tuple[str, str]:
    """(x, "1,2") of x=1, x=2; ("", text) where it is no such list."""
    parts = [[side.strip() for side in part.split("=")] for part in text.split(",")]
    names = {part[0] for part in parts}
    if len(parts) > 1 and len(names) == 1 and all(len(part) == 2 and NAME.fullmatch(part[0]) for part in parts):
        return parts[0][0], ",".join(part[1] for part in parts)
    return "", text


def without_unit(text: str) -> tuple[str, tuple | None]:
    r"""5\sqrt3 and what cm^2 is of 5\sqrt3 cm^2; text and None where no length, mass, time or the like ends it."""
    match = UNIT_AT_END.fullmatch(text)
    unit = match[3].lower() if match else ""
    unit = unit.removesuffix("s") if unit not in UNITS else unit
    if match is None or unit not in UNITS and unit != "unit":
        return text, None
    return match[1], (UNITS.get(unit, unit), match[4] or {"sq": "2", "cu": "3"}.get(match[2]))


def is_word(text: str) -> bool:
    """Whether letters are a word or points of a figure, and not a product: a product's are in order, none of eijlo."""
    if not re.fullmatch(r"[a-zA-Z]{2,}(?:[\s'-]+[a-zA-Z]+)*", text):
        return False
    letters = list(text)
    return not (letters == sorted(set(letters)) and text.islower() and not set(text) & set("eijlo")) and text != "pi"


def same(gold: str, answer: str) -> bool:
    r"""Whether the answer equals the label, both as TeX without box and dollars.

    Decided here: points and words (letter by letter), choice letters, numbers (exactly; fractions by their first six
    decimals or more), units, lists of numbers, names before an equals sign; every side of an equation has to equal the
    label. The rest is math-verify's, gold first, or second where only the answer is an inequality or a tuple.
    """
    text_only = FONT.fullmatch(gold.strip())
    gold, answer = clean(gold), clean(answer)
    if not gold or not answer or gold == answer:
        return bool(gold) and gold == answer
    letters = [re.fullmatch(r"\(?([a-zA-Z])\)?[.):]?", text) for text in (gold, answer)]
    if all(letters):
        return letters[0][1] == letters[1][1]
    if is_word(re.sub(r"^an?\s+", "", gold)) or text_only and gold.isalpha():
        words = [re.sub(r"^(?:an?|the)\s+", "", " ".join(text.lower().split())) for text in (gold, answer)]
        return gold == answer if re.fullmatch(r"[A-Z]+", gold) else words[0] == words[1]
    times = [TIME.fullmatch(text) for text in (gold, answer)]
    if times[0] and times[1]:
        (hour, minute, half), (hour2, minute2, half2) = times[0].groups(), times[1].groups()
        return (int(hour), minute) == (int(hour2), minute2) and (not half or not half2 or half == half2)
    (name, gold), (other, answer) = solutions(gold), solutions(answer)
    if name and other and name != other:
        return False
    if "=" not in gold and "=" in answer and not RELATION.search(answer):
        sides = [side.strip() for side in answer.split("=")]
        if NAME.fullmatch(sides[0]) or NAME.fullmatch(sides[-1]):
            sides = sides[1:] if NAME.fullmatch(sides[0]) else sides[:-1]
        return all(side and same(gold, side) for side in sides)
    if gold.count("=") == answer.count("=") == 1:  # 5 = x for x = 5
        left, right = (part.strip() for part in answer.split("="))
        if NAME.fullmatch(right) and not NAME.fullmatch(left):
            answer = f"{right}={left}"
    quantities = quantity(gold), quantity(answer)
    if quantities[0] and quantities[1]:
        return same_quantity(*quantities) or rounded(gold, answer, *quantities)
    if quantities[0] and log10_lower_bound(answer) > 1000 + len(gold):
        return False  # 9^{9^9}: provably larger than the label, and sympy would try to expand it
    numbers = [[quantity(part) for part in text.split(",")] for text in (gold, answer)]
    if all(all(parts) for parts in numbers):
        return sorted(numbers[0]) == sorted(numbers[1])
    if "°" in gold + answer and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", gold + answer):
        gold, answer = (ANGLE.sub(r"{(\\frac{\1\\pi}{180})}", text) for text in (gold, answer))
    if ("°" in gold) != ("°" in answer) and "\\pi" in gold + answer:
        gold, answer = (re.sub(r"°", r"\\cdot\\frac{\\pi}{180}", text) for text in (gold, answer))
    gold, answer = gold.replace("°", ""), answer.replace("°", "")
    (bare, unit), (bare2, other) = without_unit(gold), without_unit(answer)
    if unit and other and unit != other:
        return False
    if unit and other or not re.search(r"(?<![a-zA-Z])[a-zA-Z]\W*\d?\W*$", gold if unit else answer):
        gold, answer = bare, bare2  # a single letter alone may be a factor
    if RELATION.search(answer) and not RELATION.search(gold) and gold[:1] in "[(":
        gold, answer = answer, gold
    if f"{answer[:1]}{answer[-1:]}" == "()" and UNORDERED.fullmatch(gold) and not RELATION.search(gold):
        gold, answer = answer, gold  # (4,3) for \{3,4\}: math-verify heeds the order of its first alone
    from math_verify import verify

    return bool(verify(parse(gold), parse(answer), timeout_seconds=None))


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


def rounded(gold: str, answer: str, x: tuple[Fraction, str], y: tuple[Fraction, str]) -> bool:
    """Whether one is a fraction without an end and the other its decimal, of six digits or more."""
    for (exact, unit), (decimal, other), text in ((x, y, answer), (y, x, gold)):
        digits = re.fullmatch(r"-?\d*\.(\d{6,})", text.strip())
        if digits and unit == other and ("/" in gold + answer or "\\frac" in gold + answer):
            return round(exact, len(digits[1])) == decimal
    return False


@functools.cache
def math_verify_parse() -> Callable:
    """math-verify's parse, with a parser that predicts without context first: 4 times faster. ANTLR's own advice: where
    that succeeds the tree is the same, and where it fails the full prediction is asked (PredictionMode.SLL, LL)."""
    import math_verify
    from antlr4.atn.ParserATNSimulator import ParserATNSimulator
    from antlr4.atn.PredictionMode import PredictionMode

    begin, read, mode = ParserATNSimulator.__init__, math_verify.parser.latex2sympy, [PredictionMode.SLL]

    def begin_in_mode(self: Any, *args: Any) -> None:
        begin(self, *args)
        self.predictionMode = mode[0]

    def read_twice(latex: str, **settings: Any) -> Any:
        try:
            mode[0] = PredictionMode.SLL
            return read(latex, **settings)
        except Exception:
            mode[0] = PredictionMode.LL
            return read(latex, **settings)

    ParserATNSimulator.__init__, math_verify.parser.latex2sympy = begin_in_mode, read_twice
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off; ours is on
    return math_verify.parse


@functools.lru_cache(maxsize=4096)  # the responses of a group share their label and often their answer
def parse(tex: str) -> list:
    r"""math-verify's reading of \boxed{tex}: without the box it would drop parts of the text (the x of \frac34x)."""
    import sympy
    from math_verify import LatexExtractionConfig

    form = [LatexExtractionConfig(boxed_match_priority=0)]
    found = math_verify_parse()(f"\\boxed{{{tex}}}", form, parsing_timeout=None)
    if found and isinstance(found[0], sympy.Expr) and {symbol.name for symbol in found[0].free_symbols} == {"i"}:
        found[0] = found[0].subs(dict.fromkeys(found[0].free_symbols, sympy.I))
    return found


def work_math(gold: str, answer: str) -> Callable[[], float]:
    math_verify_parse()
    return lambda: float(same(gold, answer))


# ----------------------------------------------------------------------------------------------------------------------
# reasoning_gym, IFEval, reward files

# Not followed without a match. The library takes quadratic time to say so, or lets a text without letters pass.
IFEVAL_NEEDS = {
    "detectable_format:title": ">>",
    "detectable_content:number_placeholders": "]",
    "language:response_language": r"[^\W\d_]",
}


@functools.lru_cache(maxsize=128)
def reasoning_gym_dataset(task: str) -> Any:
    """In a worker: the task's dataset object, whose score_answer knows its entries. Raises ValueError if unknown.

    Its scorers that call eval, of an answer or a label, get ast.literal_eval: nothing of a text is run.
    """
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, size=1, seed=0)
    vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
    return dataset


def work_reasoning_gym(task: str, entry: dict, answer: str) -> Callable[[], float]:
    dataset = reasoning_gym_dataset(task)
    if task in ("arc_agi", "rearc"):  # JSON made lists of their tuples
        entry["metadata"]["output"] = tuple(map(tuple, entry["metadata"]["output"]))
    return lambda: rewards.in_range(dataset.score_answer(answer=answer, entry=entry))


# Their expressions take time quadratic in a run of blanks; of a hundred they see what they see of a million.
IFEVAL_BLANKS = ("detectable_content:postscript", "detectable_format:number_bullet_lists")


def work_ifeval(text: str, constraints: list[tuple[str, dict]], mean: bool) -> Callable[[], float]:
    ready = [(name, rewards.ifeval_constraint(name, kwargs)) for name, kwargs in constraints]
    shorter = re.sub(r"(\s{100})\s+", r"\1", text)

    def follows(name: str, constraint: Any) -> bool:
        if not re.search(IFEVAL_NEEDS.get(name, ""), text):
            return False
        try:
            return bool(constraint.check_following(shorter if name in IFEVAL_BLANKS else text))
        except Exception:
            # Deep JSON, a text without words: if the constraint takes a sentence, the response is to blame.
            constraint.check_following("This is a sentence.")
            return False

    def run() -> float:
        followed = [follows(name, constraint) for name, constraint in ready]
        return sum(followed) / len(followed) if mean else float(all(followed))

    return run


WORKER_MEMORY_BYTES = 2 * 2**30
FILE_MEMORY_BYTES = 16 * 2**30  # address space, of which `import torch` alone takes several GiB


def limit(kind: int, amount: int) -> None:
    """Sets a soft resource limit of this process. None on macOS, whose setrlimit refuses RLIMIT_AS."""
    if sys.platform == "darwin":
        return
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def load_file(path: str, name: str) -> Any:
    """In a worker: a user's file as the module `name`."""
    limit(resource.RLIMIT_AS, FILE_MEMORY_BYTES)
    sys.path.append(os.path.dirname(path))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def reward_functions(path: str) -> dict[str, Callable]:
    """In a worker: the functions (response, ground_truth) of a reward file, by name."""
    module = load_file(path, "reward_file")
    own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == "reward_file"]
    return {f.__name__: f for f in own if list(inspect.signature(f).parameters) == ["response", "ground_truth"]}


def work_reward_file(path: str, args: list | None) -> Callable[[], float | list[str]]:
    """In a worker: loads the file, returns what scores (function, response, label) or names the file's functions."""

    def located(call: Callable, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
            where = f" ({os.path.basename(path)}, line {lines[-1]})" if lines else ""
            raise RuntimeError(f"{type(error).__name__}: {error}{where}") from error

    functions = located(reward_functions, path)
    if args is None:
        return lambda: list(functions)
    name, response, label = args

    def run() -> float:
        value = float(located(functions[name], response, json.loads(label)))
        if not math.isfinite(value):
            raise ValueError(f"{name} returned {value}")
        return value

    return run


# ----------------------------------------------------------------------------------------------------------------------
# Environments


@functools.cache
def environment(path: str) -> Any:
    """In a worker: the module of an environment's file."""
    module = load_file(path, f"environment_{Path(path).stem}")  # a name by which pickle finds its classes
    if not (hasattr(module, "Env") or hasattr(module, "step")):
        raise ValueError("it defines neither step(episode) nor a class Env")
    return module


MAX_ANSWER_BYTES = 2**16


def work_environment(path: str, config: dict, state: str | None, episode: dict | None) -> Callable[[], dict]:
    """In a worker: a step of an environment from its state, base64 of a pickle (None: a new one of the episode's
    config); without an episode what its about(config) says. What its prepare(config) does is no part of an answer's
    time."""
    module = environment(path)
    if episode is not None and hasattr(module, "prepare"):
        module.prepare(episode["config"])

    def about() -> dict:
        return module.about(config) if hasattr(module, "about") else {}

    def step() -> dict:
        assert episode is not None
        env = module
        if hasattr(module, "Env"):
            env = pickle.loads(base64.b64decode(state)) if state else module.Env(episode["config"])
        try:
            answer = env.step(rewards.Episode(**episode))
        except (OSError, ImportError) as error:  # the policy is not to blame, nor will it see it
            return rewards.failed_answer("infra_error", f"{type(error).__name__}: {error}", path, 0.0, state)
        if answer is None:
            answer = rewards.Answer(done=True)
        elif not isinstance(answer, rewards.Answer):
            answer = rewards.Answer(answer)
        texts = [answer.text] if isinstance(answer.text, str) else answer.text
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise TypeError(f"step returned {type(answer.text).__name__}, not a text")
        numbers = {str(name): float(x) for name, x in answer.metrics.items()}
        if not all(map(math.isfinite, [answer.reward, *numbers.values()])):
            raise ValueError(f"step returned the reward {answer.reward}, the metrics {numbers}")
        return {
            "status": "ok",
            "texts": [bounded(text, MAX_ANSWER_BYTES // max(len(texts), 1)) for text in texts],
            "reward": float(answer.reward),
            "done": bool(answer.done),
            "metrics": numbers,
            "state": base64.b64encode(pickle.dumps(env)).decode() if env is not module else None,
        }

    return about if episode is None else step


def bounded(text: str, most: int) -> str:
    """A text that UTF-8 can encode, of so many bytes at most."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= most else data[: most - 6].decode(errors="ignore") + " [cut]"


# ----------------------------------------------------------------------------------------------------------------------


def end_with_trainer(protocol: socket.socket) -> None:
    """Ends this process when the trainer is gone, whatever its job waits for."""
    gone = select.poll()
    gone.register(protocol, 0)  # the other end is closed: that is told without being asked for
    gone.poll()
    os._exit(1)


def serve() -> None:
    """Serves jobs from the socket on fd 0, a JSON line each, until the trainer closes it or is gone.

    Replies {"ready": true} once imports are done (the deadline starts there), then {"score": x} or {"error": text};
    {"unavailable": text} instead of ready if the verifier cannot be set up.
    """
    protocol = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # prints of libraries must not reach the protocol, nor fill a disk
        os.dup2(null, fd)
    threading.Thread(target=end_with_trainer, args=(protocol,), daemon=True).start()
    limit(resource.RLIMIT_AS, WORKER_MEMORY_BYTES)
    for line in protocol.makefile("r", encoding="utf-8", newline="\n"):
        job = json.loads(line)
        # If the trainer is killed nobody enforces the deadline; the kernel's CPU limit then ends a job that lets no
        # other thread run.
        seconds = time.process_time() + rewards.START_TIMEOUT_S + job["timeout_s"]
        limit(resource.RLIMIT_CPU, int(seconds))
        try:
            run = globals()[job["work"]](**job["arguments"])
        except Exception as error:
            reply = {"unavailable": f"{type(error).__name__}: {error}"}
        else:
            protocol.sendall(b'{"ready": true}\n')
            try:
                reply = {"score": run()}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
        protocol.sendall(json.dumps(reply).encode() + b"\n")


def compare(path: str) -> None:
    """Prints false positives and false negatives of three ways to compare the pairs of a file."""
    from math_verify import parse as read
    from math_verify import verify

    with open(path, encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file if line.strip()]
    records = [rewards.RewardRecord(f"\\boxed{{{pair['answer']}}}", pair["label"], "math") for pair in pairs]
    ways = {
        "rewards.py": [result.score == 1.0 for result in rewards.score(records)],
        "plain math-verify": [verify(*(read(f"\\boxed{{{pair[k]}}}") for k in ("label", "answer"))) for pair in pairs],
        "equal texts": [pair["label"].strip() == pair["answer"].strip() for pair in pairs],
    }
    print(f"{len(pairs)} pairs, {sum(bool(pair['equal']) for pair in pairs)} of them equal")
    print(f"{'':20}{'false positives':>17}{'false negatives':>17}")
    for name, found in ways.items():
        wrong = [(pair, got) for pair, got in zip(pairs, found, strict=True) if bool(pair["equal"]) != got]
        print(f"{name:20}{sum(got for _, got in wrong):17}{sum(not got for _, got in wrong):17}")
        if name == "rewards.py":
            mine = wrong
    for pair, got in mine:
        print(f"{'taken for equal' if got else 'not taken for equal'}: {pair['label']} and {pair['answer']}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    elif len(sys.argv) == 2 and os.path.isfile(sys.argv[1]):
        compare(sys.argv[1])
    else:
        sys.exit(__doc__)
