"""Equality of mathematical answers: `same`, which is math-verify with rules of our own around it.

The verifier math runs this in a worker process (`work_math`). It imports nothing of ours.
"""

import collections
import functools
import logging
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

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


# --- One spelling of TeX ----------------------------------------------------------------------------------------------

FONT_NAME = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textrm|operatorname)"
FONT = re.compile(FONT_NAME + r"\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\frac\s*(?:(\d)|\{([^{}]*)\})\s*(?:(\d)|\{([^{}]*)\})")
FRACTION_WITH_BRACES = r"\\frac{\1\2}{\3\4}"
SPELLINGS = (
    ("−", "-"),
    ("∪", r"\\cup "),
    ("π", r"\\pi "),
    (r"\\[hv]?phantom\{[^{}]*\}|\\!|`", ""),
    (r"\\(?:[dtcs]|nice)frac", r"\\frac"),
    (rf"\\frac\s*\{{\s*{FONT.pattern}\s*\}}\s*\{{\s*{FONT.pattern}(\^\{{?\d\}}?)?\s*\}}", r"\\text{\1/\2}\3"),
    # a mark before what a font sets behind a value: see split_unit
    (rf"(?:(?<=[\d}})!])|(?<=\\pi))[\s~]*{FONT_NAME}\s*\{{\s*([a-zA-Z][^{{}}\d]*)\}}", r" `\1"),
    (FONT.pattern, r" \1 "),
    (r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[,!;: ]|~|\\q?quad", " "),  # not \\, which ends a row of a matrix
    (r"\\([%$])", r"\1"),
    (r"\\lg(?![a-z])", r"\\log"),
    (r"\^\s*\{?\\circ\}?|\\degree|(?<=[\d})])\s*`?\s*deg(?:ree)?s?\b", "°"),
    (r"°\s*`?\s*([CF])\b", r" `deg\1"),
    (r"`(?=[KVA]\b(?!\.))", "` one"),  # units; without a font they are factors
    (r"\\varnothing|\\\{\s*\\\}", r"\\emptyset"),
    (r"(?<![\w})])\+(?=\\infty)", ""),
    (r"\\frac\{\s*d\s*(\w)\s*\}\{\s*d\s*\w\s*\}(?=\s*=)", r"\1'"),  # dy/dx is a name
    (r"(?<=[\d}])[\s~]*\\Omega(?![a-zA-Z])", " `ohm"),
    (r"^\s*(?:all )?real(?: number)?s\s*$", r"(-\\infty,\\infty)"),
)
# 2^3 of \log_2 3 would otherwise be read as a list or as \log_{23}
LOG_OF_NUMBER = re.compile(r"\\log\s*_\s*(?:(\d)|\{\s*(\d+)\s*\})\s*(?:\{\s*)?(\d+(?:\.\d+)?)(?:\s*\})?")
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?:\s\d{3})+)(?![\d,]|\s\d)")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{?(\d+)\}?")
MIXED = re.compile(
    r"(?<![\w^}{./)])(\d{1,99})\s*(?:\\frac\{(\d{1,99})\}\{(\d{1,99})\}|(?<=\s)(\d{1,99})/(\d{1,99}))(?![\w^])"
)
EXPONENT = re.compile(r"(?<![\w.^{])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
SCIENTIFIC = re.compile(
    r"(?<![\w.^{)])([-+]?\d+(?:\.\d+)?)\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))(?![\w.^])"
)
MULTIPLES = {"dozen": 12, "hundred": 100, **THOUSANDS, "billion": 10**9, "trillion": 10**12}
MULTIPLE = re.compile(rf"(?<![\w.^{{])(\d+(?:\.\d+)?)\s*`?\s*({'|'.join(MULTIPLES)})\b", re.IGNORECASE)
SET_OF = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{?R\}?\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}")
HALF_OF_DAY = re.compile(r"(?<=\d)\s*`?\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)
OR = re.compile(r"\s*,?\s*`?(?:\\lor|\\vee|\bor\b)\s*")
AND = re.compile(r"\s*,?\s*`?(?:\\land|\\wedge|\band\b|;)\s*")


def tex_number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def repeating_as_fraction(match: re.Match) -> str:
    """\\frac{5}{6} of 0.8\\overline{3}."""
    whole, digits, period = match.groups()
    of_period = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits))
    return tex_number(Fraction(f"{whole or 0}.{digits or 0}") + of_period)


def mixed_as_fraction(match: re.Match) -> str:
    """\\frac{7}{2} of 3\\frac{1}{2} and of 3 1/2."""
    numerator = int(match[2] or match[4])
    denominator = int(match[3] or match[5])
    if numerator >= denominator:
        return match[0]
    return tex_number(int(match[1]) + Fraction(numerator, denominator))


def multiple_as_number(match: re.Match) -> str:
    """1200 of 1.2 \\times 10^3, 2500000 of 2.5 million."""
    number, multiple, *digit = match.groups()
    factor = MULTIPLES.get((multiple or "").lower()) or Fraction(10) ** int(multiple or digit[0])
    return tex_number(Fraction(number) * factor)


def clean_numbers(text: str) -> str:
    """A text with all numbers as digits or \\frac, and $5 as 5 dollars."""
    is_list = text[:1] in "([{\\" and not text.startswith("\\frac")
    if not is_list:  # in a list 1,000 is two numbers
        text = GROUPED.sub(lambda match: re.sub(r"[\s,]", "", match[0]), text)
    text = REPEATING.sub(repeating_as_fraction, text)
    text = MIXED.sub(mixed_as_fraction, text)
    text = EXPONENT.sub(lambda match: tex_number(Fraction(match[0])), text)
    text = SCIENTIFIC.sub(multiple_as_number, text)
    text = MULTIPLE.sub(multiple_as_number, text)
    return re.sub(r"^(-?)\s*([$€£])\s*(?=[\d.\\-])([^,]*)$", r"\1\3 `\2", text)


def clean(tex: str) -> str:
    """The answer without invisible parts, fonts and spaces of TeX, in one spelling: see SPELLINGS, clean_numbers.
    Numbers in words become digits, inequalities intervals, `and` and `or` commas, and a \\pm two items."""
    words = FONT.sub(r" \1 ", tex).strip(" .")
    number = number_in_words(re.sub(r"^(?:an?|the)\s", "", words))
    if number is not None:
        return str(number)

    text = tex.strip().strip("$")
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    text = FRACTION.sub(FRACTION_WITH_BRACES, text.strip().rstrip(".").strip())
    text = clean_numbers(LOG_OF_NUMBER.sub(r"\\log_{\1\2}(\3)", text))
    set_of = SET_OF.fullmatch(text)
    if set_of:
        text = set_of[1].strip()
    text = text.removeprefix("\\approx").strip()
    text = re.sub(r"(?<=\d)\s+(?=\d)", ",", text)
    text = HALF_OF_DAY.sub(lambda match: f" {match[1].lower()}m", text)
    interval = as_intervals(text)
    if interval and set_of:
        return interval.partition("\\in ")[2]
    text = interval or AND.sub(", ", OR.sub(", ", text))
    before, *after = re.split(r"\\pm(?![a-z])\s*", text)
    if len(after) != 1 or "," in text:
        return text
    return f"{before}+{after[0]}, {before}-{after[0]}"


# --- Inequalities -----------------------------------------------------------------------------------------------------

VARIABLE = r"(?:[a-df-zA-Z]|\\(?:theta|alpha|beta|lambda|mu|phi|omega)(?![a-z]))(?:_\{?\w\}?)?"
BOUND = re.compile(r"(?:[-+*/^!\d.{}()\s]|\\(?:frac|sqrt|pi|infty|ln|log|cdot|times)(?![a-z])|e(?![a-z]))+")
SIGNS = {"≤": r"\\leq?(?:slant)?|<=", "≥": r"\\geq?(?:slant)?|>=", "≠": r"\\neq?", "<": r"\\lt", ">": r"\\gt"}
RELATION = re.compile("|".join([*SIGNS, *(rf"(?:{spellings})(?![a-zA-Z])" for spellings in SIGNS.values())]))
MIRRORED = str.maketrans("<>≤≥", "><≥≤")


def bounds_of(relation: str) -> list[tuple[str, str, str]]:
    """(x, >, 1), (x, <, 3) of 1 < x < 3; raises ValueError for a text that does not bound one variable by numbers."""
    parts = [part.strip() for part in re.split("([<>≤≥≠])", relation)]
    found = []
    for left, sign, right in zip(parts[:-2:2], parts[1::2], parts[2::2], strict=True):
        if BOUND.fullmatch(left):
            left, sign, right = right, sign.translate(MIRRORED), left
        if not re.fullmatch(VARIABLE, left) or not BOUND.fullmatch(right):
            raise ValueError(relation)
        found.append((left, sign, right))
    return found


def interval_of(bounds: list[tuple[str, str, str]]) -> str:
    """(1,3] of (x, >, 1), (x, ≤, 3); raises ValueError for two bounds on one side."""
    if len(bounds) == 1 and bounds[0][1] == "≠":
        return f"(-\\infty,{bounds[0][2]})\\cup({bounds[0][2]},\\infty)"
    sides = {"≥>".find(sign) < 0: (sign, bound) for _, sign, bound in bounds}
    if len(sides) < len(bounds) or not bounds or any(sign == "≠" for _, sign, _ in bounds):
        raise ValueError(bounds)
    low_sign, low = sides.get(False, (">", "-\\infty"))
    high_sign, high = sides.get(True, ("<", "\\infty"))
    return f"{'[' if low_sign == '≥' else '('}{low},{high}{']' if high_sign == '≤' else ')'}"


def as_intervals(text: str) -> str | None:
    """x\\in (-\\infty,1)\\cup(3,\\infty) of x < 1 or x > 3; None for a text that is no inequality of this kind."""
    if not RELATION.search(text):
        return None
    for sign, spellings in SIGNS.items():
        text = re.sub(rf"(?:{spellings})(?![a-zA-Z])", sign, text)
    text = re.sub(rf"^\|({VARIABLE})\|\s*([<≤])([^<≤]+)$", r"-\3 \2 \1 \2 \3", text)
    text = re.sub(rf"^\|({VARIABLE})\|\s*([>≥])([^>≥]+)$", r"-\3 \2 \1 or \1 \2 \3", text)
    try:
        options = [[bound for part in AND.split(option) for bound in bounds_of(part)] for option in OR.split(text)]
        union = "\\cup".join(map(interval_of, options))
    except ValueError:
        return None
    names = {name for bounds in options for name, _, _ in bounds}
    return f"{names.pop()}\\in {union}" if len(names) == 1 else None


# --- Units ------------------------------------------------------------------------------------------------------------

# A measure, the size of a unit and the unit's names, singular; with * the names that take a prefix, as in kilometer.
# A unit that is not here is a measure of its own.
UNIT_TABLE = """
length 1 * m meter metre
length 0.0254 in inch inche
length 0.3048 ft foot feet
length 0.9144 yd yard
length 1609.344 mi mile
length3 0.001 * l L liter litre
mass 1 * g gram
mass 453.59237 lb pound
mass 28.349523125 oz ounce
time 1 * s sec second
time 60 min minute
time 3600 h hr hour
time 86400 day
time 604800 week
energy 1 * J joule
power 1 * W watt
force 1 * N newton
pressure 1 * Pa pascal
frequency 1 * Hz hertz
voltage 1 * volt oneV
current 1 * ampere oneA
resistance 1 * ohm
temperature 1 * kelvin oneK
amount 1 * mol mole
money 1 $ dollar usd
money 0.01 ¢ cent
share 0.01 % percent
"""
PREFIXES = {"k": 3, "kilo": 3, "d": -1, "deci": -1, "c": -2, "centi": -2, "m": -3, "milli": -3, "M": 6, "mega": 6}
UNITS: dict[str, tuple[str, int, Fraction]] = {}  # name -> (measure, its power, size)
for _line in UNIT_TABLE.strip().splitlines():
    _measure, _size, *_names = _line.split()
    _base = (_measure.rstrip("3"), 3 if "3" in _measure else 1)
    for _name in _names:
        UNITS[_name] = (*_base, Fraction(_size))
        for _prefix, _power in PREFIXES.items() if "*" in _names else ():
            if (len(_prefix) > 1) == (len(_name) > 2):
                UNITS[_prefix + _name] = (*_base, Fraction(_size) * Fraction(10) ** _power)
UNIT_SPELLINGS = {
    r"\bmph\b": "mi/h",
    r"\bkm?ph\b": "km/h",
    r"\bper\b": "/",
    r"\b(?:square|sq)\b\.?\s+([a-z]+)": r"\1^2",
    r"\b(?:cubic|cu)\b\.?\s+([a-z]+)": r"\1^3",
    r"\s+squared\b": "^2",
    r"\s+cubed\b": "^3",
    r"\\cdot|`": " ",
}
# Words behind a number that are no unit of it
NO_UNITS = set(
    """not no nor or and but if is isn are was than less more least most about maybe perhaps possibly except wrong false
    incorrect minus plus times over pi sqrt sin cos tan cot sec csc log ln exp mod inf infinity choose true right
    half third quarter halves point""".split()
)
NO_UNITS |= WORDS.keys()
UNIT = r"[a-zA-Z%$€£¢](?:[-a-zA-Z/. *%$€£¢`]|\\cdot(?![a-z])|\^\s*\{?-?\d\}?)*"
UNIT_AT_END = re.compile(rf"(?:(?<=[\w}})!.])\s+(?=[a-zA-Z])|(?<=\d)(?=[a-zA-Z])|(?<=[\d}})])\s*(?=[%$€£¢]))({UNIT})$")


class Unit(NamedTuple):
    """Measures with their powers, the size in units of size 1, and whether the table has all parts."""

    measures: dict[str, int]
    size: Fraction
    is_known: bool


def unit_of(text: str, is_marked: bool) -> Unit | None:
    """The unit of km/h, square meters, m\\cdot s^{-2} or red apples; None for a text that is none.

    is_marked: a font tells that the text is no product; otherwise an unknown name has to be a word of 3 letters."""
    if not re.fullmatch(UNIT, text):
        return None
    for pattern, spelling in UNIT_SPELLINGS.items():
        text = re.sub(pattern, spelling, text, flags=re.IGNORECASE)
    measures: collections.Counter[str] = collections.Counter()
    size = Fraction(1)
    is_known = True
    for number, part in enumerate(text.split("/")):
        for name, power in re.findall(r"([a-zA-Z]+|[%$€£¢])(?:\.?\s*\^\s*\{?(-?\d))?", part):
            singular = name.lower().removesuffix("s")
            known = UNITS.get(name) or UNITS.get(name.lower()) or UNITS.get(singular)
            is_word_of_many = len(name) + is_marked > 2 and (is_marked or is_word(name))
            if name.lower() in NO_UNITS or not (known or is_word_of_many or name in "€£"):
                return None
            is_known = is_known and known is not None
            measure, own_power, own_size = known or (singular, 1, Fraction(1))
            exponent = int(power or 1) * (-1 if number else 1)
            measures[measure] += own_power * exponent
            size *= own_size**exponent
    return Unit({measure: power for measure, power in measures.items() if power}, size, is_known)


def split_unit(text: str) -> tuple[str, Unit | None]:
    """5\\sqrt3 and the unit of 5\\sqrt3 cm^2; the text without marks and None if it does not end in a unit.

    What a font sets behind a value, marked in SPELLINGS, is a unit. Without a font a unit is a word behind a number, or
    one of the table behind any expression; there, a single letter is a factor."""
    value, mark, name = text.partition("`")
    match = None if mark else UNIT_AT_END.search(text, max(0, len(text) - 60))
    if match:
        value = text[: match.start()]
        name = match[1]
    unit = unit_of(name.strip(), bool(mark))
    is_number = rational(value) is not None
    if unit is None or not (mark or is_number or (unit.is_known and len(name.strip()) > 1)):
        return text.replace("`", ""), None
    return value.strip(), unit


def scaled(text: str, unit: Unit | None, other: Unit | None = None) -> str:
    """The TeX of a value in one unit as a value in the other one, or without a unit."""
    factor = (unit.size if unit else 1) / (other.size if other else Fraction(1))
    value = rational(text)
    if factor == 1:
        return text
    return f"{tex_number(factor)}\\cdot({text})" if value is None else tex_number(value * factor)


def same_measures(gold: str, answer: str) -> bool:
    """Whether two values with units are equal. Two units have to be of one measure; then the values are converted. A
    unit that only one of them has counts as the other's.

    From 1 on, a number and as many % are equal too, as the MATH normalizer and math-verify have it: MATH's own labels
    of a share may lack the sign, and answers do. Below 1, 0.5 and 0.5 % differ."""
    gold, answer = same_angles(gold, answer)
    gold_value, gold_unit = split_unit(gold)
    answer_value, answer_unit = split_unit(answer)
    if gold_unit and answer_unit:
        is_one_measure = gold_unit.measures == answer_unit.measures
        return is_one_measure and same_values(scaled(gold_value, gold_unit, answer_unit), answer_value)
    unit = gold_unit or answer_unit
    if unit and unit.measures == {"share": 1}:
        if same_values(scaled(gold_value, gold_unit), scaled(answer_value, answer_unit)):
            return True
        number = rational(gold_value)
        if number is not None and abs(number) < 1:
            return False
    return same_values(gold_value, answer_value)


# --- Values -----------------------------------------------------------------------------------------------------------

NUMBER = r"[-+]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})"
RATIONAL = re.compile(rf"(-?)\s*(?:\\frac\{{\s*({NUMBER})\s*\}}\{{\s*({NUMBER})\s*\}}|({NUMBER})(?:/({NUMBER}))?)")
DECIMAL_IN_TEX = re.compile(r"(?<![\d.])(?:\d{1,400}\.\d{1,400}|\.\d{1,400})(?![\d.])")
DECIMAL = re.compile(r"\s*-?(?=\.?\d)(\d*)\.?(\d*)(?![\d./])")
DIGITS = 100  # of a value that is not rational
ALIKE = Fraction(1, 10**90)  # relative difference of two such values that count as equal
LARGEST = {"Pow": 10**6, "exp": 10**6, "factorial": 10**5, "factorial2": 10**5, "subfactorial": 10**4, "gamma": 10**5}
MAX_BITS = 4 * 10**6
LARGE_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{[^{}]*(?:\d{6}|\d\s*[\^!])")


def rational(text: str) -> Fraction | None:
    """The value of -2.5, 1/3 or \\frac{1}{3}; None for every other text."""
    match = RATIONAL.fullmatch(text.strip())
    if match is None:
        return None
    sign, numerator, denominator, number, divisor = match.groups()
    below = Fraction(denominator or divisor or 1)
    if not below:
        return None
    value = Fraction(numerator or number) / below
    return -value if sign else value


def is_cut_short(exact: Fraction, decimal: str, enough: int = 6) -> bool:
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
    shifted = abs(exact) * 10**decimals
    as_cut = math.floor(shifted)
    as_rounded = math.floor(shifted + Fraction(1, 2))
    has_sign_of_exact = decimal.strip().startswith("-") == (exact < 0)
    return has_sign_of_exact and int(digits or 0) in (as_cut, as_rounded)


def same_values(gold: str, answer: str) -> bool:
    """Whether two values without units are equal: rationals exactly, other numbers by same_numbers, a decimal also with
    what it cuts short (see is_cut_short). The rest is math-verify's."""
    gold_value = rational(gold)
    answer_value = rational(answer)
    if gold_value is not None and gold_value == answer_value:
        return True
    for decimal, other in ((gold, answer), (answer, gold)):
        if re.fullmatch(r"\s*-?\d*\.\d{1,400}\s*", decimal) and not re.fullmatch(NUMBER, other.strip()):
            exact = real_value(other)
            if exact is not None and is_cut_short(exact, decimal):
                return True
    if gold_value is not None and answer_value is not None:
        return False

    gold_number = number_of(gold)
    answer_number = number_of(answer)
    if gold_number is not None and answer_number is not None:
        return same_numbers(gold_number, answer_number)
    from math_verify import verify

    return bool(verify(parse(gold), parse(answer), timeout_seconds=None))


def is_too_large(tree: Any) -> bool:
    """Whether a tree of sympy has a power or factorial of which nobody needs the digits."""
    import sympy

    if any(map(is_too_large, tree.args)):
        return True
    largest = LARGEST.get(type(tree).__name__)
    if largest is None or not tree.args[-1].is_number:
        return False
    exponent = tree.args[-1]
    return abs(exponent if exponent.is_Rational else sympy.N(exponent)) > largest


def exact_value(tree: Any) -> Fraction | None:
    """The value of sums, products, powers and factorials of rationals; None for another tree. Raises OverflowError."""
    if tree.is_Rational:
        return Fraction(int(tree.p), int(tree.q))
    values = [exact_value(part) for part in tree.args]
    if not values or None in values:
        return None
    match type(tree).__name__:
        case "Add":
            return sum(values, Fraction(0))
        case "Mul":
            return math.prod(values, start=Fraction(1))
        case "UnevaluatedExpr":
            return values[0]
        case "factorial" if values[0].denominator == 1 and values[0] >= 0:
            return Fraction(math.factorial(int(values[0])))
        case "Pow" if values[1].denominator == 1 and (values[0] or values[1] >= 0):
            bits = max(values[0].numerator.bit_length(), values[0].denominator.bit_length())
            if bits * abs(values[1]) > MAX_BITS:
                raise OverflowError("a number with too many digits")
            return values[0] ** int(values[1])
    return None


def value_of(tree: Any) -> Any:
    """The value of a number: a Fraction if it is rational, else sympy's number of DIGITS digits. A real or imaginary
    part of which sympy knows no digit, after ten times as many, is 0."""
    import sympy

    value = exact_value(tree)
    if value is None:
        tree = tree.doit()
        value = exact_value(tree)
    if value is not None:
        return value
    parts = sympy.N(tree, DIGITS, maxn=10 * DIGITS).as_real_imag()
    real, imaginary = (sympy.S.Zero if part.is_Float and part._prec == 1 else part for part in parts)
    return real + imaginary * sympy.I


def same_numbers(gold: Any, answer: Any) -> bool:
    """Whether two numbers, as trees of sympy, are equal: exactly if both are rational, else to 90 digits."""
    import sympy

    try:
        values = [value_of(gold), value_of(answer)]
    except OverflowError:
        return False
    if all(isinstance(value, Fraction) for value in values):
        return values[0] == values[1]
    one, other = map(sympy.sympify, values)
    if not (one.is_finite and other.is_finite):
        return one == other
    return bool(abs(one - other) <= max(abs(one), abs(other)) * sympy.sympify(ALIKE))


def number_of(tex: str) -> Any:
    """sympy's tree of a text that is a number; None for everything else."""
    from sympy import Expr

    parsed = parse(tex)
    return parsed[0] if parsed and isinstance(parsed[0], Expr) and parsed[0].is_number else None


def real_value(tex: str) -> Fraction | None:
    """The value of a real number, such as \\sqrt2, to 100 digits; None for everything else."""
    number = number_of(tex)
    value = None if number is None else value_of(number)
    if value is None or isinstance(value, Fraction):
        return value
    return Fraction(str(value)) if value.is_Float else None


# --- Words and names --------------------------------------------------------------------------------------------------

NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'*(?:\([a-z](?:,[a-z])*\))?")
# f(3), P(A), f^{-1}(2), \angle ABC, \overline{AB}, |AB|, \sin x
QUANTITY = re.compile(
    rf"{NAME.pattern}|[fghpqAEFGHPQSTV](?:_\{{?\w+\}}?)?'*(?:\^\{{?-1\}}?)?\s*\([^()]*\)"
    r"|\\angle\s*[A-Z]+|\\(?:overline|vec)\s*\{\w+\}|\|\s*[A-Z]{2}\s*\||\\(?:sin|cos|tan)\s*\\?[a-zA-Z]+"
)
CHOICE = re.compile(r"\(?([a-zA-Z])\)?[.):]?")
OPERATOR = r"[+*/=^_<>,|&]|-\s|\\(?:cdot|times|cup|cap|in|le|ge|neq?|pm|to)(?![a-z])"
CHOICE_WITH_TEXT = re.compile(rf"(?:\(([A-J])\)|([A-J])[.):])\s+(?!{OPERATOR})(.*\S)")
OTHER_CHOICE = re.compile(r"(?<![a-zA-Z])(?:[A-Ja-j]\)|[A-J](?:[.:]|\s*$))")
TIME = re.compile(r"(\d{1,2})(?::(\d\d))?(?: ([ap])m)?")
ANGLE = re.compile(r"(?<!\d)(\d+(?:\.\d+)?)\s*°")
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
RADIANS = re.compile(r"(?<=[\w})])\s*`?\s*rad(?:ian)?s?\b\.?$")
CONGRUENCE = re.compile(r"(?:.*\\equiv\s*)?(-?\d{1,99})\s*\(?\s*\\?[pb]?mod\s*\{?\s*(\d{1,99})\s*\}?\s*\)?")
MEMBER = re.compile(rf"({VARIABLE})\s*\\in(?![a-z])\s*(.*)")
IN_BASE = re.compile(r"[\d)]\s*_")


def is_word(text: str) -> bool:
    """Whether letters are a word, or points of a figure, and not a product. The letters of a product are x, y and z, or
    in alphabetical order, each once, and none of eijlo."""
    if text == "pi" or not re.fullmatch(r"(?![xyz]+$)[a-zA-Z]{2,}(?:[\s'-]+[a-zA-Z]+)*", text):
        return False
    letters = list(text)
    in_order = letters == sorted(set(letters))
    return not (in_order and text.islower() and not set(text) & set("eijlo"))


def choice_and_text(text: str) -> tuple[str, str]:
    """(B, 42) of (B) 42, (B, "") of (B), and ("", text) of a text that begins with no letter of a choice."""
    text = re.sub(r"^(?:option|choice)\s+", "", text.replace("`", ""), flags=re.IGNORECASE)
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
    words = [re.sub(r"^(?:an?|the)\s+", "", " ".join(text.lower().split())) for text in (gold, answer)]
    return words[0] == words[1]


def same_times(gold: str, answer: str) -> bool | None:
    """Whether two times of day are equal, or may be if one lacks am and pm; None if one is not a time. 19:00 is 7 pm,
    and 7 pm is 7:00 pm."""
    gold_time = TIME.fullmatch(gold)
    answer_time = TIME.fullmatch(answer)
    if not gold_time or not answer_time or not all(time[2] or time[3] for time in (gold_time, answer_time)):
        return None
    halves = gold_time[3] or answer_time[3]
    times = []
    for hour, minute, half in (gold_time.groups(), answer_time.groups()):
        if halves and not half and not 1 <= int(hour) <= 12:
            half = "p" if int(hour) > 12 else "a"
            hour = abs(int(hour) - 12)
        times.append((int(hour), minute or "00", half or halves))
    return times[0] == times[1]


def same_congruences(gold: str, answer: str) -> bool | None:
    """Whether two residues are equal, as x \\equiv 3 \\pmod 7 and 10 \\pmod{7}, or one and a number; else None."""
    residues = [CONGRUENCE.fullmatch(text) for text in (gold, answer)]
    found = [residue for residue in residues if residue]
    if not found or not int(found[0][2]):
        return None
    modulus = int(found[0][2])
    if len(found) == 2:
        return modulus == int(found[1][2]) and (int(found[0][1]) - int(found[1][1])) % modulus == 0
    return same(gold if residues[1] else found[0][1], answer if residues[0] else found[0][1])


def items(text: str, separator: str = ",") -> list[str]:
    """What stands between the separators that are in no bracket; nothing if the brackets do not match."""
    parts = []
    start = 0
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position])
            start = position + len(separator)
    parts.append(text[start:])
    return [part.strip() for part in parts]


VALUES_OF_TUPLE = re.compile(r"\(([^()]*)\)\s*=\s*\((.*)\)")


def named_values(text: str) -> dict[str, str] | None:
    """{"x": "3", "y": "4"} of x=3, y=4 and of (x,y)=(3,4); None if a text does not give several names a value each."""
    of_tuple = VALUES_OF_TUPLE.fullmatch(text)
    sides = [items(side) for side in of_tuple.groups()] if of_tuple else [item.split("=") for item in items(text)]
    equations = list(zip(*sides, strict=False)) if of_tuple else sides
    if any(len(equation) != 2 for equation in equations) or (of_tuple and len(sides[0]) != len(sides[1])):
        return None
    named = {name.strip(): value for name, value in equations}
    return named if 2 <= len(named) == len(equations) and all(map(NAME.fullmatch, named)) else None


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

    in_order = ", ".join(named[name] for name in sorted(named, key=lambda name: name.lstrip("\\")))
    if gold_values:
        return same(f"({in_order})", answer)
    return len(items(gold)) == 1 and same(gold, f"({in_order})")


def all_sides_equal(gold: str, sides: list[str]) -> bool:
    """Whether every side of an equation equals the label, but for a quantity without a value at one of its ends."""
    if QUANTITY.fullmatch(sides[0]):
        sides = sides[1:]
    elif QUANTITY.fullmatch(sides[-1]):
        sides = sides[:-1]
    return all(side and same(gold, side) for side in sides)


def without_name(text: str) -> tuple[str, str]:
    """(x, 5) of x = 5 and of 5 = x, (x\\in, S) of x \\in S, ("", text) of every other text."""
    member = MEMBER.fullmatch(text)
    if member:
        return f"{member[1]}\\in", member[2]
    sides = items(text, "=")
    if len(sides) == 2 and all(sides) and not re.search(r"[<>]|\\[lg]e", text):
        for name, value in (sides, sides[::-1]):
            if NAME.fullmatch(name):
                return name.partition("(")[0], value
    return "", text


def same_angles(gold: str, answer: str) -> tuple[str, str]:
    """Label and answer without °: converted to radians if one of them is in radians or inside a trigonometric
    function."""
    both = gold + answer
    in_radians = "\\pi" in both or any(RADIANS.search(text) for text in (gold, answer))
    gold, answer = (RADIANS.sub("", text) for text in (gold, answer))
    if "°" in both and TRIGONOMETRY.search(both):
        gold = ANGLE.sub(r"{(\\frac{\1\\pi}{180})}", gold)
        answer = ANGLE.sub(r"{(\\frac{\1\\pi}{180})}", answer)
    if ("°" in gold) != ("°" in answer) and in_radians:
        gold = gold.replace("°", "\\cdot\\frac{\\pi}{180}")
        answer = answer.replace("°", "\\cdot\\frac{\\pi}{180}")
    return gold.replace("°", ""), answer.replace("°", "")


# --- Lists, tuples, sets, intervals, matrices -------------------------------------------------------------------------

MATRIX = re.compile(r"\\begin\{([bpvBV]?matrix|array)\}(?:\{[clr|]*\})?(.*?)\\end\{\1\}", re.DOTALL)
SUCH_THAT = re.compile(r"\\mid|\\vert|[|:]|\\in(?![a-z])")
VECTOR = re.compile(r"\\langle(?![a-z])(.*)\\rangle")


def collection(text: str) -> tuple[str, list[str]] | None:
    """The brackets, "" for none, and items of a list, tuple, set or interval, or the shape and items of a matrix; None
    for another text."""
    matrix = MATRIX.fullmatch(text)
    if matrix:
        rows = [row.split("&") for row in matrix[2].strip().removesuffix("\\\\").split("\\\\")]
        widths = sorted(set(map(len, rows)))
        return f"{len(rows)}x{widths}{matrix[1].replace('b', 'p')}", sum(rows, [])
    text = VECTOR.sub(r"(\1)", text).replace("\\{", "{").replace("\\}", "}")
    listed = items(text)
    brackets = text[:1] + text[-1:]
    inside = items(text[1:-1])
    if len(listed) > 1:
        return "", listed
    if brackets not in ("()", "[]", "(]", "[)", "{}") or SUCH_THAT.search(text):
        return None
    if len(inside) < (1 if brackets == "{}" else 2):
        return None
    return "()" if brackets == "[]" and len(inside) > 2 else brackets, inside


def unwrapped(text: str) -> str:
    """The item of a collection that has one; the text itself where it is none."""
    found = collection(text)
    if found is None:
        return text
    _, items_of_it = found
    return items_of_it[0] if len(items_of_it) == 1 else text


def same_collections(gold: str, answer: str) -> bool | None:
    """Whether two collections are equal; None if math-verify has to tell.

    The order of sets and lists does not count. It counts between a list and a tuple. A column or row is the vector with
    its items. A set is no tuple and no interval. A set of one item is the item."""
    unions = [items(text, "\\cup") for text in (gold, answer)]
    if len(unions[0]) == len(unions[1]) > 1:
        return same_items(*unions, in_order=False) or None
    found = [collection(text) for text in (gold, answer)]
    kinds = {one[0] for one in found if one}
    singles = [unwrapped(gold), unwrapped(answer)]
    if singles != [gold, answer] and kinds != {"{}"}:
        return "" not in kinds and same(*singles)
    if None in found:
        return False if "" in kinds else None
    (_, left), (_, right) = found
    of_vector = {"()", *(f"{shape}pmatrix" for shape in (f"{len(left)}x[1]", f"1x[{len(left)}]"))}
    is_vector = "()" in kinds and kinds <= of_vector
    has_names = kinds == {"", "()"} and any("=" in item for item in left + right)  # two values of x are no point
    if has_names or not (len(kinds) == 1 or is_vector or kinds in ({"", "()"}, {"", "{}"})):
        return False
    return len(left) == len(right) and same_items(left, right, in_order=not kinds <= {"", "{}"})


def same_items(gold: list[str], answer: list[str], in_order: bool) -> bool:
    """Whether as many items are equal one by one, in any order if the order does not count."""
    left = list(answer)
    for item in gold:
        candidates = left[:1] if in_order else left
        found = next((i for i, candidate in enumerate(candidates) if same(item, candidate)), None)
        if found is None:
            return False
        del left[found]
    return not left


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

    Decided here: points and words (letter by letter), choices, times, residues, numbers (exactly; a decimal equals the
    fraction or root that it cuts short by is_cut_short), units, lists, tuples, sets and matrices item by item, names
    before an equals sign. Every side of an equation has to equal the label. The rest is math-verify's.
    """
    is_text = FONT.fullmatch(gold.strip()) is not None
    gold = clean(gold)
    answer = clean(without_words_around(answer))
    if gold == answer:
        return bool(gold)
    has_all_braces = gold.count("{") - gold.count("}") == answer.count("{") - answer.count("}")
    if not gold or not answer or not has_all_braces:
        return False
    if IN_BASE.search(gold + answer):
        return re.sub(r"[\s{}]", "", gold) == re.sub(r"[\s{}]", "", answer)

    equal = same_words(gold, answer, is_text)
    for rule in (same_times, same_congruences, same_named_values):
        if equal is None:
            equal = rule(gold, answer)
    if equal is not None:
        return equal
    return same_but_for_names(gold, answer)


def same_but_for_names(gold: str, answer: str) -> bool:
    """Whether two texts of clean are equal, but for the name of a variable that only one of them has."""
    exact, about, rounded = answer.partition("\\approx")
    if about:
        value = real_value(exact)
        return value is not None and is_cut_short(value, rounded, enough=0) and same(gold, exact)
    sides = items(answer, "=")  # not split at the = of \sum_{k=1}
    if "=" not in gold and len(sides) > 1 and len(items(answer)) == 1 and not RELATION.search(answer):
        return all_sides_equal(gold, sides)

    gold_name, bare_gold = without_name(gold)
    answer_name, bare_answer = without_name(answer)
    if gold_name != answer_name and gold_name[-3:] == answer_name[-3:] == "\\in":
        return False
    if gold_name and (gold_name == answer_name or "=" not in answer):
        gold = bare_gold
    if answer_name and (gold_name == answer_name or "=" not in gold):
        answer = bare_answer
    equal = same_collections(gold, answer)
    return same_measures(gold, answer) if equal is None else equal


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
    compare_exactly(math_verify.grader)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off; ours is on
    return math_verify.parse


def compare_exactly(grader: Any) -> None:
    """Has math-verify compare the numbers inside of sets, equations and matrices by same_numbers. Its own comparison
    takes numbers that differ by less than 1e-15 for equal."""
    from sympy import Expr

    numeric = grader.sympy_numeric_eq
    symbolic = grader.sympy_symbolic_eq

    def numeric_eq(gold: Any, answer: Any, *settings: int) -> bool:
        if not isinstance(gold, Expr) or not isinstance(answer, Expr):
            return numeric(gold, answer, *settings)
        return gold.is_number and answer.is_number and same_numbers(gold, answer)

    def symbolic_eq(gold: Any, answer: Any) -> bool:
        are_numbers = getattr(gold, "is_number", False) and getattr(answer, "is_number", False)
        return not are_numbers and symbolic(gold, answer)

    grader.sympy_numeric_eq = numeric_eq
    grader.sympy_symbolic_eq = symbolic_eq


@functools.lru_cache(maxsize=4096)  # the responses of a group share their label and often their answer
def parse(tex: str) -> list:
    r"""math-verify's reading of \boxed{tex}; without the box it would drop parts of the text (the x of \frac34x).

    Decimals are read as fractions. Nothing is read of a text whose numbers are too large: see is_too_large."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    if LARGE_BINOMIAL.search(tex):
        return []
    tex = DECIMAL_IN_TEX.sub(lambda match: f"{{({tex_number(Fraction(match[0]))})}}", tex)
    # units=False: it would drop the ab of 3ab
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]
    parsed = math_verify_parse()(f"\\boxed{{{tex}}}", config, parsing_timeout=None)
    if parsed and isinstance(parsed[0], sympy.Basic) and is_too_large(parsed[0]):
        return []
    if parsed and isinstance(parsed[0], sympy.Expr):
        symbols = parsed[0].free_symbols
        if {symbol.name for symbol in symbols} == {"i"}:  # the imaginary unit
            parsed[0] = parsed[0].subs(dict.fromkeys(symbols, sympy.I))
    return parsed


def work_math(gold: str, answer: str) -> Callable[[], float]:
    """In a worker: the function that scores the answer."""
    math_verify_parse()
    return lambda: float(same(gold, answer))
