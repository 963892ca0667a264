r"""numbers.py: the number that a text means. A policy is read leniently, right answers strictly.

An answer means the number directly behind its last "####" or "\boxed{", or else its last number:

    1,234  1{,}234  1\,234  $1234     1234; spaces of thousands are thin or no-break ones
    1.5e3                             1500; more than two digits of an exponent are no number
    3/4  \frac34  \frac{3}{4}  2\frac{1}{2}
    -5  - 5  −5  –5                   below zero, whatever the dash; "7 - 5" means 5
    42%                               42
    #### Step 2: ...  #### 3. Then    a heading, no number

A right answer in a file is nothing but one such number, alone or behind a mark.
"""

import re
from fractions import Fraction

# A number is not preceded by a letter, digit, point, slash or exponent, nor followed by more of
# these: "1e999999999" and "2026/01/02" are no numbers, rather than the digits they end with.
NUMBER = re.compile(
    r"(?<![\w./])(?<![\d.][eE][-+])[-+]?(?:\\?\$)?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?"
    r"(?:[eE][-+]?\d{1,2})?(?:/\d+(?:\.\d+)?)?(?![.,/]?\d|[eE][-+]?\d)",
    re.ASCII,
)
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,;!]|[\u2009\u202f\u00a0])(?=\d{3})")
# full-width characters, and spaces, as ASCII has them
ASCII = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
ASCII |= dict.fromkeys((0xA0, 0x2009, 0x202F), " ")
REWRITTEN = (  # what people write -> what NUMBER reads
    (r"[\u2010-\u2013\u2212]", "-"),
    (r"((?:^|[=:#{(])[ \t*$]*)(?<!:)- +(?=[\d.$])", r"\1-"),
)
PART = r"(?:(\d)|\{(-?[\d,.]{1,40})\})"
FRACTION = re.compile(rf"(?:(-?)(\d+)\s?|(-?))\\[dt]?frac\s?{PART}{PART}", re.ASCII)
HEADING = re.compile(r"\d+[.)]\s+[^\W\d]")  # "#### 3. Then" states no number
NUMBER_CHARACTERS = 64  # a longer number is wrong, whatever it says
CHARACTERS = 1024  # of an answer that are looked at, so that the work is bounded


def as_one(found):
    """A fraction of TeX, or a mixed number, as "a/b"."""
    sign, whole, other, *parts = (part.replace(",", "") for part in found.groups(""))
    above, below = parts[0] or parts[1], parts[2] or parts[3]
    try:
        return f"{sign or other}{Fraction(whole or 0) + Fraction(above) / Fraction(below)}"
    except (ValueError, ZeroDivisionError):
        return f"{above}/{below}"  # is none


def plain(text):
    """A text with every number as NUMBER reads it."""
    text = THOUSANDS.sub(",", text).translate(ASCII)
    for pattern, written in REWRITTEN:
        text = re.sub(pattern, written, text)
    return FRACTION.sub(as_one, text)


def value(number):
    """What a number is; None if there is none, if it is too long, or divided by zero."""
    if not number or len(number) > NUMBER_CHARACTERS:
        return None
    above, _, below = re.sub(r"[,$\\]", "", number).partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None


def behind_mark(text):
    r"""What stands behind the last "####" (GSM8K), in its line, or in the last "\boxed{" (MATH),
    whichever comes last; None without them."""
    place = max(text.rfind("####"), text.rfind("\\boxed{"))
    line = text[place : place + CHARACTERS].partition("\n")[0]
    if place < 0:
        return None
    return plain(line[4:]) if line[0] == "#" else plain(line[7:]).partition("}")[0]


def stated_number(text):
    """The number directly behind the mark; None if there is none."""
    behind = (behind_mark(text) or "").lstrip(" *$\\(<")
    found = None if HEADING.match(behind) else NUMBER.match(behind)
    return value(found and found[0])


def meant_number(text):
    """The number that a text states, or else its last one."""
    stated = stated_number(text)
    if stated is not None:
        return stated
    return value([None, *NUMBER.findall(plain(text[-CHARACTERS:]))][-1])


def only_number(text):
    """The number that a text is, alone or behind the mark; None if there is anything else."""
    behind = behind_mark(text)
    text = plain(text[:CHARACTERS]) if behind is None else behind
    found = NUMBER.fullmatch(text.lstrip(" *$\\()\n").rstrip(" *$.%\\()\n"))
    return value(found and found[0])


def numeric(answer, expected, parsable=0.0):
    """1 when an answer means the number that is expected, `parsable` for a wrong one that is
    stated."""
    number = meant_number(answer)
    right = number is not None and number == only_number(expected)
    return 1.0 if right else parsable * (stated_number(answer) is not None)
