"""Numbers in words and mixed numbers in plain text, as gsm8k's answers have them."""

import re
import unicodedata

from scripts.parts.equality import FRACTION, FRACTION_WITH_BRACES, IN_WORDS, MIXED, mixed_as_fraction, number_in_words

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


def without_mixed_numbers(text: str) -> str:
    """\\frac{5}{2} of 2 1/2, 2\\frac12, 2½ and `2 and a half` in a plain text; 1/2 of ½."""
    text = re.sub(r"\\boxed\s*\{", " ", text)
    text = text.translate(FRACTION_SIGNS)
    text = re.sub(r"\\[dtc]frac", r"\\frac", AND_A_HALF.sub(" 1/2", text))
    text = FRACTION.sub(FRACTION_WITH_BRACES, text)
    text = re.sub(r"(?<=\d)\s+and\s+(?=\d+/\d)", " ", text)
    return MIXED.sub(mixed_as_fraction, text)
