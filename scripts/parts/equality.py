"""Equality of mathematical answers: `same`, which is math-verify with rules of our own around it.

The verifier math runs this in a worker process (`work_math`). By hand it compares the pairs of a file and prints the
errors of `same`, of plain math-verify and of equality as texts:

    python scripts/parts/equality.py tests/math_pairs.jsonl  # rows {label, answer, equal}
"""

import functools
import json
import logging
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

# --- Numbers in words -------------------------------------------------------------------------------------------------


SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = {word: n for n, word in enumerate(SMALL)} | {word: 10 * n for n, word in enumerate(TENS, start=2)}
THOUSANDS = {"thousand": 1000, "million": 10**6}

_DIGIT = "|".join(SMALL[1:10])
_TEEN = "|".join(SMALL[10:])
_BELOW_100 = rf"(?:(?:{'|'.join(TENS)})(?:[\s-]+(?:{_DIGIT}))?|{_TEEN}|{_DIGIT})"
_BELOW_1000 = rf"(?:(?:(?:{_TEEN}|{_DIGIT}|an?)\s+)?hundred(?:\s+(?:and\s+)?{_BELOW_100})?|{_BELOW_100})"
_THOUSANDS = rf"(?:{_BELOW_1000}\s+)?thousand(?:,?\s+(?:and\s+)?{_BELOW_1000})?"
_MILLIONS = rf"(?:{_BELOW_1000}\s+)?million(?:,?\s+(?:and\s+)?(?:{_THOUSANDS}|{_BELOW_1000}))?"
IN_WORDS = re.compile(rf"\b(?:{_MILLIONS}|{_THOUSANDS}|{_BELOW_1000}|zero)\b", re.IGNORECASE)
BEFORE_ANSWER = re.compile(
    r"[\W_]*(?:the\s+)?(?:final\s+)?(?:answer\b)?(?:\s+is\b)?(?:[\W_]|[a-z]{1,9}\{)*", re.IGNORECASE
)
FRACTION_SIGNS = {
    ord(sign): " " + unicodedata.normalize("NFKC", sign).replace("⁄", "/") for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
AND_A_HALF = re.compile(r"(?<=\d)\s+and\s+(?:a|one)[\s-]+half\b", re.IGNORECASE)
PART_OR_MULTIPLE = re.compile(
    r"[\s-]+(?:(?:half|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth)s?|halves|dozen|point"
    r"|billion|trillion)\b",
    re.IGNORECASE,
)


def number_in_words(text: str) -> int | None:
    """21 for twenty-one; None for a text that is not one number in words below a billion."""
    if not IN_WORDS.fullmatch(text.strip()):
        return None
    words = re.split(r"[\s,-]+(?:and\s+)?", text.lower().strip())
    total = 0
    below_thousand = 0
    for word in words:
        if word in WORDS:
            below_thousand += WORDS[word]
        elif word == "hundred":
            below_thousand = (below_thousand or 1) * 100
        elif word in THOUSANDS:
            total += (below_thousand or 1) * THOUSANDS[word]
            below_thousand = 0
    return total + below_thousand


def digits_of_words(text: str) -> str:
    """21 apples of twenty-one apples: numbers in words as digits, if the text begins with one; else the text.

    Only markup and `the answer is` may stand before it. A number that goes on otherwise (two thirds, two dozen, two
    point five) leaves the text as it is."""
    begin = BEFORE_ANSWER.match(text).end()
    first = IN_WORDS.match(text, begin)
    if first is None or PART_OR_MULTIPLE.match(text, first.end()):
        return text
    digits = IN_WORDS.sub(lambda match: str(number_in_words(match[0])), text[begin : begin + 1000])
    return without_mixed_numbers(digits)


# --- One spelling of TeX ----------------------------------------------------------------------------------------------

FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textrm|operatorname)\s*\{([^{}]*)\}")
SPACE = re.compile(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[,!;: ]|~|\\q?quad")  # not \\, which ends a row of a matrix
LOG_OF_NUMBER = re.compile(r"\\log\s*_\s*(?:(\d)|\{\s*(\d+)\s*\})\s*(?:\{\s*)?(\d+(?:\.\d+)?)(?:\s*\})?")
FRACTION = re.compile(r"\\frac\s*(?:(\d)|\{([^{}]*)\})\s*(?:(\d)|\{([^{}]*)\})")
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?:\s\d{3})+)(?![\d,]|\s\d)")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{?(\d+)\}?")
MIXED = re.compile(
    r"(?<![\w^}{./)])(\d{1,99})\s*(?:\\frac\{(\d{1,99})\}\{(\d{1,99})\}|(?<=\s)(\d{1,99})/(\d{1,99}))(?![\w^])"
)
EXPONENT = re.compile(r"(?<![\w.^{])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
SCIENTIFIC = re.compile(
    r"(?<![\w.^{)])([-+]?\d+(?:\.\d+)?)\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))(?![\w.^])"
)
SET_OF = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{?R\}?\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}")
HALF_OF_DAY = re.compile(r"(?<=:\d\d)\s*([ap])\.?m\.?(?![a-z])", re.IGNORECASE)
OR = re.compile(r"\s*(?:\\lor|\\vee|\\wedge|\\land|\b(?:or|and)\b|;)\s*")


def tex_number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def fraction_with_braces(match: re.Match) -> str:
    """\\frac{1}{2} of \\frac12."""
    return f"\\frac{{{match[1] or match[2]}}}{{{match[3] or match[4]}}}"


def log_with_braces(match: re.Match) -> str:
    """\\log_{2}(3) of \\log_2 3, which would otherwise be read as a list or as \\log_{23}."""
    return f"\\log_{{{match[1] or match[2]}}}({match[3]})"


def without_groups(match: re.Match) -> str:
    """1000 of 1,000 and of 1 000."""
    return re.sub(r"[\s,]", "", match[0])


def repeating_as_fraction(match: re.Match) -> str:
    """\\frac{5}{6} of 0.8\\overline{3}."""
    whole, digits, period = match.groups()
    nines = 10 ** len(period) - 1
    value = Fraction(f"{whole or 0}.{digits or 0}")
    value += Fraction(int(period), nines * 10 ** len(digits))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def mixed_as_fraction(match: re.Match) -> str:
    """\\frac{7}{2} of 3\\frac{1}{2} and of 3 1/2."""
    whole = int(match[1])
    numerator = int(match[2] or match[4])
    denominator = int(match[3] or match[5])
    if numerator >= denominator:
        return match[0]
    numerator += whole * denominator
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def without_mixed_numbers(text: str) -> str:
    """\\frac{5}{2} of 2 1/2, 2\\frac12, 2½ and `2 and a half` in a plain text; 1/2 of ½."""
    text = re.sub(r"\\boxed\s*\{", " ", text)
    text = text.translate(FRACTION_SIGNS)
    text = re.sub(r"\\[dtc]frac", r"\\frac", AND_A_HALF.sub(" 1/2", text))
    text = FRACTION.sub(fraction_with_braces, text)
    text = re.sub(r"(?<=\d)\s+and\s+(?=\d+/\d)", " ", text)
    return MIXED.sub(mixed_as_fraction, text)


def scientific_as_number(match: re.Match) -> str:
    """1200 of 1.2 \\times 10^3."""
    power = Fraction(10) ** int(match[2] or match[3])
    return tex_number(Fraction(match[1]) * power)


def clean_tex(tex: str) -> str:
    """`tex` without invisible parts, fonts and spaces of TeX; one spelling of signs, fractions and lists."""
    text = re.sub(r"\\[hv]?phantom\{[^{}]*\}|\\!", "", tex)
    text = FONT.sub(r" \1 ", text)
    text = SPACE.sub(" ", text)
    text = text.replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"\\lg(?![a-z])", r"\\log", text)
    text = text.replace("^\\circ", "°").replace("^{\\circ}", "°").replace("\\degree", "°")
    text = text.strip().rstrip(".").strip()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = FRACTION.sub(fraction_with_braces, text)
    text = LOG_OF_NUMBER.sub(log_with_braces, text)
    return OR.sub(", ", text)


def clean_numbers(text: str) -> str:
    """A text of clean_tex with all numbers as digits or \\frac."""
    is_list = text[:1] in "([{\\" and not text.startswith("\\frac")
    if not is_list:  # in a list 1,000 is two numbers
        text = GROUPED.sub(without_groups, text)
    text = REPEATING.sub(repeating_as_fraction, text)
    text = MIXED.sub(mixed_as_fraction, text)
    text = EXPONENT.sub(lambda match: tex_number(Fraction(match[0])), text)
    return SCIENTIFIC.sub(scientific_as_number, text)


def clean(tex: str) -> str:
    """The answer in one spelling: see clean_tex, clean_numbers. Numbers in words become digits."""
    words = FONT.sub(r" \1 ", tex).strip(" .")
    number = number_in_words(re.sub(r"^(?:an?|the)\s", "", words))
    if number is not None:
        return str(number)

    text = clean_numbers(clean_tex(tex))
    set_of = SET_OF.fullmatch(text)
    if set_of:
        text = set_of[1].strip()
    text = text.removeprefix("\\approx").strip()
    text = re.sub(r"(?<=\d)\s+(?=\d)", ",", text)
    return HALF_OF_DAY.sub(lambda match: f" {match[1].lower()}m", text)


# --- Numbers with units -----------------------------------------------------------------------------------------------

# A measure, the size of a unit and the unit's names, singular. A unit that is not here is a measure of its own.
UNIT_TABLE = """
length 1 mm millimeter millimetre
length 10 cm centimeter centimetre
length 100 dm
length 1000 m meter metre
length 1000000 km kilometer kilometre
length 25.4 in inch inche
length 304.8 ft foot feet
length 914.4 yd yard
length 1609344 mi mile
mass 1 mg milligram
mass 1000 g gram
mass 1000000 kg kilogram
time 1 s sec second
time 60 min minute
time 3600 h hr hour
time 86400 day
time 604800 week
volume 1 ml milliliter millilitre
volume 10 cl
volume 1000 l L liter litre
money 1 cent ¢
money 100 $ dollar usd
share 1/100 % percent
angle 1 ° degree deg
speed 1 m/s
speed 5/18 km/h kph
speed 0.44704 mph
"""
UNITS: dict[str, tuple[str, Fraction]] = {}  # name -> (measure, size)
for _line in UNIT_TABLE.strip().splitlines():
    _measure, _size, *_names = _line.split()
    UNITS |= dict.fromkeys(_names, (_measure, Fraction(_size)))
PERCENT = ("%", "percent")

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
QUANTITY = re.compile(
    rf"(-?)\s*(\$?)\s*(?:(-?)\\frac\{{({NUMBER})\}}\{{({NUMBER})\}}|({NUMBER})(?:/({NUMBER}))?)"
    r"\s*(\$|%|¢|°|[a-zA-Z][a-zA-Z. /]*)?\s*(?:\^\{?(\d)\}?)?"
)
MAX_DIGITS = 60


class Quantity(NamedTuple):
    """A number with its unit, "" for none."""

    value: Fraction
    unit: str


def quantity(text: str) -> Quantity | None:
    """The quantity of a text of clean, None if the text is not one number with at most one unit."""
    match = QUANTITY.fullmatch(text.strip())
    if match is None or any(len(group or "") > MAX_DIGITS for group in match.groups()):
        return None
    sign, dollar, inner_sign, numerator, denominator, number, divisor, unit, power = match.groups()
    if power and not unit:  # 2^3
        return None
    if unit and len(unit.strip()) == 1 and unit.strip() not in UNITS:  # 3x
        return None
    try:
        value = Fraction(numerator or number) / Fraction(denominator or divisor or 1)
    except ZeroDivisionError:
        return None
    if bool(sign) != bool(inner_sign):
        value = -value

    unit = (unit or dollar).strip().lower().rstrip(".")
    if unit not in UNITS and unit.removesuffix("s") in UNITS:
        unit = unit.removesuffix("s")
    if unit and unit not in UNITS and not re.fullmatch(r"[a-z/ ]{2,}", unit):
        return None
    return Quantity(value, unit + (power or ""))


def in_smallest_unit(given: Quantity) -> tuple[str, Fraction]:
    """(measure, value in the unit of size 1 of this measure)."""
    measure, size = UNITS.get(given.unit, (given.unit, 1))
    return measure, given.value * size


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether two quantities are equal. If both have units, these must be equal, or of one measure; then the values are
    converted.

    From 1 on, a number and as many % are equal too, as the MATH normalizer and math-verify have it: MATH's own labels
    of a share may lack the sign, and answers do. Below 1, 0.5 and 0.5 % differ."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return in_smallest_unit(gold) == in_smallest_unit(answer)

    equal = gold.value == answer.value
    if gold.unit == answer.unit or (gold.unit not in PERCENT and answer.unit not in PERCENT):
        return equal
    gold_share = gold.value / 100 if gold.unit else gold.value
    answer_share = answer.value / 100 if answer.unit else answer.value
    return gold_share == answer_share or (equal and abs(gold.value) >= 1)


DECIMAL = re.compile(r"\s*-?(?=\.?\d)(\d*)\.?(\d*)(?![\d./])")
ENOUGH_DIGITS = 6


def is_cut_short(exact: Fraction, decimal: str, enough: int = ENOUGH_DIGITS) -> bool:
    """Whether the decimal that begins a text is `exact` cut or rounded to as many decimals.

    0.666666 and 0.666667 are 2/3, and 0.666665 and 0.66667 are not: there must be `enough` decimals, and as many digits
    behind the leading zeros, so that 0.000003 is not 1/300000."""
    match = DECIMAL.match(decimal)
    if match is None:
        return False
    decimals = len(match[2])
    digits = (match[1] + match[2]).lstrip("0")
    if min(decimals, len(digits)) < enough:
        return False
    scaled = abs(exact) * 10**decimals
    as_cut = math.floor(scaled)
    as_rounded = math.floor(scaled + Fraction(1, 2))
    has_sign_of_exact = decimal.strip().startswith("-") == (exact < 0)
    return has_sign_of_exact and int(digits or 0) in (as_cut, as_rounded)


def same_numbers(gold: str, answer: str) -> bool | None:
    """Whether two numbers with units, or two lists of them in any order, are equal; None if the texts are no numbers.
    A decimal equals the fraction that it cuts short: see is_cut_short."""
    gold_quantity = quantity(gold)
    answer_quantity = quantity(answer)
    if gold_quantity and answer_quantity:
        if same_quantity(gold_quantity, answer_quantity):
            return True
        if "/" not in gold + answer and "\\frac" not in gold + answer:
            return False
        if gold_quantity.unit != answer_quantity.unit:
            return False
        return is_cut_short(gold_quantity.value, answer) or is_cut_short(answer_quantity.value, gold)

    if gold_quantity and log10_lower_bound(answer) > 1000 + len(gold):
        return False  # 9^{9^9}: provably larger than the label, and sympy would try to expand it
    gold_items = gold.split(",")
    answer_items = answer.split(",")
    if None in map(quantity, gold_items + answer_items):
        return None
    if len(gold_items) != len(answer_items):
        return False
    pairs = zip(sorted(gold_items, key=quantity), sorted(answer_items, key=quantity), strict=True)
    return all(same_numbers(of_gold, of_answer) for of_gold, of_answer in pairs)


def log10_lower_bound(text: str, depth: int = 0) -> float:
    """A lower bound of log10 of a positive integer written with digits, n! and towers of powers; else -inf."""
    if depth > 16 or len(text) > 200:
        return -math.inf
    text = text.strip()
    if text[:1] + text[-1:] in ("()", "{}"):
        return log10_lower_bound(text[1:-1], depth + 1)
    if text.isdecimal():
        return math.log10(int(text)) if int(text) else -math.inf

    factorial = re.fullmatch(r"(\d+|\(.*\))!", text)
    if factorial:
        n = 10.0 ** min(log10_lower_bound(factorial[1], depth + 1), 300.0)
        return n * math.log10(n / math.e) if n > math.e else -math.inf  # n! > (n/e)^n
    power = re.fullmatch(r"(\d+)(?:\^(\d|\{.*\}|\(.*\))|\*\*(.+))", text)
    if power:
        base = log10_lower_bound(power[1], depth + 1)
        exponent = log10_lower_bound(power[2] or power[3], depth + 1)
        return base * 10.0 ** min(exponent, 300.0) if base > 0 and exponent >= 0 else -math.inf
    return -math.inf


# --- Words, names and units of expressions ----------------------------------------------------------------------------

NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'*(?:\([a-z](?:,[a-z])*\))?")
UNORDERED = re.compile(r"\\\{.*,.*\\\}|(?!.*\\in(?![a-z]))[^()\[\]=]*,[^()\[\]=]*")
RELATION = re.compile(r"<|>|\\(?:le|ge|leq|geq|lt|gt|leqslant|geqslant)(?![a-zA-Z])|[≤≥]")
CHOICE = re.compile(r"\(?([a-zA-Z])\)?[.):]?")
OPERATOR = r"[+*/=^_<>,|&]|-\s|\\(?:cdot|times|cup|cap|in|le|ge|neq?|pm|to)(?![a-z])"
CHOICE_WITH_TEXT = re.compile(rf"(?:\(([A-J])\)|([A-J])[.):])\s+(?!{OPERATOR})(.*\S)")
OTHER_CHOICE = re.compile(r"(?<![a-zA-Z])(?:[A-Ja-j]\)|[A-J](?:[.:]|\s*$))")
TIME = re.compile(r"(\d{1,2}):(\d\d)(?: ([ap]m))?")
ANGLE = re.compile(r"(?<!\d)(\d+(?:\.\d+)?)\s*°")
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
UNIT_AT_END = re.compile(
    r"(.*?[\w})])\s+(?:(sq|cu)(?:uare|bic)?\.?\s+)?([a-zA-Z]{2,}|[mgshlL])\.?\s*(?:\^\s*\{?(\d)\}?)?"
)
LETTER_AT_END = re.compile(r"(?<![a-zA-Z])[a-zA-Z]\W*\d?\W*$")


def is_word(text: str) -> bool:
    """Whether letters are a word, or points of a figure, and not a product. The letters of a product are in
    alphabetical order, each once, and none of eijlo."""
    if text == "pi" or not re.fullmatch(r"[a-zA-Z]{2,}(?:[\s'-]+[a-zA-Z]+)*", text):
        return False
    letters = list(text)
    in_order = letters == sorted(set(letters))
    return not (in_order and text.islower() and not set(text) & set("eijlo"))


def plain_words(text: str) -> str:
    """Lower case, single spaces, no article at the start."""
    return re.sub(r"^(?:an?|the)\s+", "", " ".join(text.lower().split()))


def choice_and_text(text: str) -> tuple[str, str]:
    """(B, 42) of (B) 42, (B, "") of (B), and ("", text) of a text that begins with no letter of a choice."""
    alone = CHOICE.fullmatch(text)
    if alone:
        return alone[1], ""
    match = CHOICE_WITH_TEXT.fullmatch(text)
    return (match[1] or match[2], match[3]) if match else ("", text)


def same_choice(gold: str, answer: str) -> bool | None:
    """Whether two choices are equal, each a letter, a letter with its text or, for the answer, the label's text alone;
    None if the label is no choice, or only the answer is none. An answer whose text offers another choice is wrong."""
    gold_letter, gold_text = choice_and_text(gold)
    letter, text = choice_and_text(answer)
    if not gold_letter or not (letter or gold_text):
        return None
    if letter and (letter != gold_letter or OTHER_CHOICE.search(text)):
        return False
    return not gold_text or not text or same(gold_text, text)


def same_words(gold: str, answer: str, is_text: bool) -> bool | None:
    """Whether two choices, words or points of a figure are equal; None if the label is none of these. is_text: the
    label is in a font for text."""
    equal = same_choice(gold, answer)
    if equal is not None:
        return equal
    if not is_word(re.sub(r"^an?\s+", "", gold)) and not (is_text and gold.isalpha()):
        return None
    if re.fullmatch(r"[A-Z]+", gold):  # points of a figure
        return gold == answer
    return plain_words(gold) == plain_words(answer)


def same_times(gold: str, answer: str) -> bool | None:
    """Whether two times of day are equal, or may be if one lacks am and pm; None if one is not a time."""
    gold_time = TIME.fullmatch(gold)
    answer_time = TIME.fullmatch(answer)
    if not gold_time or not answer_time:
        return None
    gold_hour, gold_minute, gold_half = gold_time.groups()
    hour, minute, half = answer_time.groups()
    if int(gold_hour) != int(hour) or gold_minute != minute:
        return False
    return gold_half == half or not gold_half or not half


def solutions(text: str) -> tuple[str, str]:
    """(x, "1,2") of x=1, x=2; ("", text) if the text is not such a list."""
    names = set()
    values = []
    for equation in text.split(","):
        sides = [side.strip() for side in equation.split("=")]
        if len(sides) != 2 or not NAME.fullmatch(sides[0]):
            return "", text
        names.add(sides[0])
        values.append(sides[1])
    if len(values) < 2 or len(names) > 1:
        return "", text
    return names.pop(), ",".join(values)


def items(text: str) -> list[str]:
    """What stands between the commas that are in no bracket."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


VALUES_OF_TUPLE = re.compile(r"\(([^()]*)\)\s*=\s*\((.*)\)")


def named_values(text: str) -> dict[str, str] | None:
    """{"x": "3", "y": "4"} of x=3, y=4 and of (x,y)=(3,4); None if a text does not give several names a value each."""
    of_tuple = VALUES_OF_TUPLE.fullmatch(text)
    if of_tuple:
        names = items(of_tuple[1])
        values = items(of_tuple[2])
    else:
        equations = [item.split("=") for item in items(text)]
        if any(len(sides) != 2 for sides in equations):
            return None
        names = [sides[0].strip() for sides in equations]
        values = [sides[1] for sides in equations]

    if not 2 <= len(set(names)) == len(names) == len(values) or not all(map(NAME.fullmatch, names)):
        return None
    return dict(zip(names, values, strict=True))


def same_named_values(gold: str, answer: str) -> bool | None:
    """Whether x=3, y=4 and another text are equal; None if no text is of this kind.

    Two such texts have the same names with equal values. (3,4) is the values in the alphabetical order of their names.
    So is 3,4 for a label with names; as a label it has no order, and no names."""
    gold_values = named_values(gold)
    answer_values = named_values(answer)
    if gold_values and answer_values:
        same_names = gold_values.keys() == answer_values.keys()
        return same_names and all(same(value, answer_values[name]) for name, value in gold_values.items())
    named = gold_values or answer_values
    if not named:
        return None

    plain = answer if gold_values else gold
    is_tuple = plain[:1] + plain[-1:] == "()"
    if not is_tuple and not gold_values:
        return False
    given = items(plain[1:-1] if is_tuple else plain)
    in_order = [named[name] for name in sorted(named, key=lambda name: name.lstrip("\\"))]
    if len(given) != len(in_order):
        return False
    pairs = zip(in_order, given, strict=True) if gold_values else zip(given, in_order, strict=True)
    return all(same(of_gold, of_answer) for of_gold, of_answer in pairs)


def all_sides_equal(gold: str, answer: str) -> bool:
    """Whether every side of the equation `answer` equals the label, but for a name at one of its ends."""
    sides = [side.strip() for side in answer.split("=")]
    if NAME.fullmatch(sides[0]):
        sides = sides[1:]
    elif NAME.fullmatch(sides[-1]):
        sides = sides[:-1]
    return all(side and same(gold, side) for side in sides)


def name_first(equation: str) -> str:
    """x=5 of 5 = x."""
    left, right = (side.strip() for side in equation.split("="))
    if NAME.fullmatch(right) and not NAME.fullmatch(left):
        return f"{right}={left}"
    return equation


def same_angles(gold: str, answer: str) -> tuple[str, str]:
    """Label and answer without °: converted to radians if one of them is in radians or inside a trigonometric
    function."""
    both = gold + answer
    if "°" in both and TRIGONOMETRY.search(both):
        gold = ANGLE.sub(r"{(\\frac{\1\\pi}{180})}", gold)
        answer = ANGLE.sub(r"{(\\frac{\1\\pi}{180})}", answer)
    if ("°" in gold) != ("°" in answer) and "\\pi" in gold + answer:
        gold = gold.replace("°", "\\cdot\\frac{\\pi}{180}")
        answer = answer.replace("°", "\\cdot\\frac{\\pi}{180}")
    return gold.replace("°", ""), answer.replace("°", "")


def split_unit(text: str) -> tuple[str, tuple | None]:
    r"""5\sqrt3 and a value for cm^2 of 5\sqrt3 cm^2; the text and None if it does not end in a unit of length, mass,
    time or the like. Equal units have equal values."""
    match = UNIT_AT_END.fullmatch(text)
    if match is None:
        return text, None
    unit = match[3].lower()
    if unit not in UNITS:
        unit = unit.removesuffix("s")
    if unit not in UNITS and unit != "unit":
        return text, None
    power = match[4] or {"sq": "2", "cu": "3"}.get(match[2])
    return match[1], (UNITS.get(unit, unit), power)


# --- The comparison ---------------------------------------------------------------------------------------------------


SENTENCE = re.compile(r"(?:the\s{1,8})?(?:final\s{1,8})?answer(?:\s{1,8}is|:)\s{0,8}(?!not\b)", re.IGNORECASE)
BOLD = re.compile(r"\*\*([^*]+)\*\*")


def without_words_around(answer: str) -> str:
    """42 of `The answer is 42` and of Markdown's `**42**`."""
    start = SENTENCE.match(answer)
    if start:
        answer = answer[start.end() :]
    bold = BOLD.fullmatch(answer)
    return bold[1] if bold else answer


def same(gold: str, answer: str) -> bool:
    r"""Whether the answer equals the label, both as TeX without box and dollars.

    Decided here: points and words (letter by letter), choices, times, numbers (exactly; a decimal equals the fraction
    or root that it cuts short by is_cut_short), units, lists of numbers, names before an equals sign. Every side of an
    equation has to equal the label. Everything else is decided by same_expressions.
    """
    is_text = FONT.fullmatch(gold.strip()) is not None
    gold = clean(gold)
    answer = clean(without_words_around(answer))
    if gold == answer:
        return bool(gold)
    if not gold or not answer:
        return False

    equal = same_words(gold, answer, is_text)
    if equal is None:
        equal = same_times(gold, answer)
    if equal is not None:
        return equal

    equal = same_named_values(gold, answer)
    if equal is not None:
        return equal
    gold_name, gold = solutions(gold)
    answer_name, answer = solutions(answer)
    if gold_name and answer_name and gold_name != answer_name:
        return False
    if answer_name and gold[:1] == "(" and len(items(gold)) == 1:  # two values of x are no point
        return False
    exact, about, rounded = answer.partition("\\approx")
    if about:
        value = real_value(exact)
        return value is not None and is_cut_short(value, rounded, enough=0) and same(gold, exact)
    if "=" not in gold and "=" in answer and not RELATION.search(answer):
        return all_sides_equal(gold, answer)
    if gold.count("=") == answer.count("=") == 1:
        answer = name_first(answer)

    equal = same_numbers(gold, answer)
    return same_expressions(gold, answer) if equal is None else equal


def same_expressions(gold: str, answer: str) -> bool:
    """Whether two expressions with equal units are equal by math-verify.

    math-verify gets the label first. It gets the answer first if only the answer is an inequality and the label an
    interval, or if the answer is a tuple and the label a set, as in (4,3) for \\{3,4\\}: math-verify compares the order
    of elements only if its first argument has an order."""
    gold, answer = same_angles(gold, answer)
    bare_gold, gold_unit = split_unit(gold)
    bare_answer, answer_unit = split_unit(answer)
    both_have_units = gold_unit is not None and answer_unit is not None
    if both_have_units and gold_unit != answer_unit:
        return False
    # The unit m at the end of one text alone may be a factor m.
    if both_have_units or not LETTER_AT_END.search(gold if gold_unit else answer):
        gold = bare_gold
        answer = bare_answer

    equal = same_decimal(gold, answer)
    if equal is not None:
        return equal

    from math_verify import verify

    gold_is_relation = RELATION.search(gold) is not None
    only_answer_is_relation = not gold_is_relation and RELATION.search(answer) and gold[:1] in "[("
    answer_is_tuple = answer[:1] + answer[-1:] == "()"
    if only_answer_is_relation or (answer_is_tuple and not gold_is_relation and UNORDERED.fullmatch(gold)):
        return bool(verify(parse(answer), parse(gold), timeout_seconds=None))
    return bool(verify(parse(gold), parse(answer), timeout_seconds=None))


@functools.cache
def math_verify_parse() -> Callable:
    """math-verify's parse, with a parser that first predicts without context: 4 times faster.

    ANTLR's own advice (PredictionMode.SLL, LL): if prediction without context succeeds, the tree is the same; if it
    fails, the full prediction is tried."""
    import math_verify
    from antlr4.atn.ParserATNSimulator import ParserATNSimulator
    from antlr4.atn.PredictionMode import PredictionMode

    original_init = ParserATNSimulator.__init__
    original_read = math_verify.parser.latex2sympy
    mode = [PredictionMode.SLL]

    def init_with_mode(self: Any, *args: Any) -> None:
        original_init(self, *args)
        self.predictionMode = mode[0]

    def read_twice(latex: str, **settings: Any) -> Any:
        try:
            mode[0] = PredictionMode.SLL
            return original_read(latex, **settings)
        except Exception:
            mode[0] = PredictionMode.LL
            return original_read(latex, **settings)

    ParserATNSimulator.__init__ = init_with_mode
    math_verify.parser.latex2sympy = read_twice
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off; ours is on
    return math_verify.parse


@functools.lru_cache(maxsize=4096)  # the responses of a group share their label and often their answer
def parse(tex: str) -> list:
    r"""math-verify's reading of \boxed{tex}; without the box it would drop parts of the text (the x of \frac34x)."""
    import sympy
    from math_verify import LatexExtractionConfig

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = math_verify_parse()(f"\\boxed{{{tex}}}", config, parsing_timeout=None)
    if parsed and isinstance(parsed[0], sympy.Expr):
        symbols = parsed[0].free_symbols
        if {symbol.name for symbol in symbols} == {"i"}:  # the imaginary unit
            parsed[0] = parsed[0].subs(dict.fromkeys(symbols, sympy.I))
    return parsed


def real_value(tex: str) -> Fraction | None:
    """The value of a real number, such as \\sqrt2, to 100 digits; None for everything else."""
    import sympy

    parsed = parse(tex)
    if not parsed or not isinstance(parsed[0], sympy.Expr) or not parsed[0].is_number:
        return None
    value = sympy.N(parsed[0], 100)
    return Fraction(str(value)) if value.is_Rational or value.is_Float else None


def same_decimal(gold: str, answer: str) -> bool | None:
    """Whether a decimal is the value of an expression, exactly or cut short (see is_cut_short); None if no text is a
    decimal, or the other one is no real number."""
    for decimal, exact in ((gold, answer), (answer, gold)):
        if re.fullmatch(r"\s*-?\d*\.\d{1,60}\s*", decimal):
            value = real_value(exact)
            if value is not None:
                return abs(value - Fraction(decimal)) < Fraction(1, 10**90) or is_cut_short(value, decimal)
    return None


def work_math(gold: str, answer: str) -> Callable[[], float]:
    """In a worker: the function that scores the answer."""
    math_verify_parse()
    return lambda: float(same(gold, answer))


# --- By hand ----------------------------------------------------------------------------------------------------------


def compare(path: str) -> None:
    """Prints the errors of three ways to compare the pairs of a file."""
    from math_verify import parse as read
    from math_verify import verify

    import rewards

    pairs = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    boxed = [(f"\\boxed{{{pair['label']}}}", f"\\boxed{{{pair['answer']}}}") for pair in pairs]
    records = [rewards.RewardRecord(answer, label, "math") for label, answer in boxed]
    ours = [result.score == 1.0 for result in rewards.score(records)]
    print_errors("plain math-verify", pairs, [verify(read(label), read(answer)) for label, answer in boxed])
    print_errors("equal texts", pairs, [label == answer for label, answer in boxed])
    print_errors("rewards.py", pairs, ours)
    for pair, verdict in zip(pairs, ours, strict=True):
        if verdict != pair["equal"]:
            print(f"{'taken for equal' if verdict else 'not taken for equal'}: {pair['label']} and {pair['answer']}")


def print_errors(name: str, pairs: Sequence[dict], verdicts: Sequence[bool]) -> None:
    """One line: how many unequal pairs were taken for equal, and how many equal ones were not."""
    wrong = [verdict for pair, verdict in zip(pairs, verdicts, strict=True) if verdict != pair["equal"]]
    positives = sum(wrong)
    print(f"{name}: {positives} false positives, {len(wrong) - positives} false negatives of {len(pairs)} pairs")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not os.path.isfile(sys.argv[1]):
        sys.exit(__doc__)
    compare(sys.argv[1])
