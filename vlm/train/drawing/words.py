"""Made-up names, goods, dates and amounts for documents; no torch, no files.

Names are built from syllables, so that reading them needs every letter. A name belongs for ever to one of two
halves by its checksum: training documents use one half only, held-out documents mostly the other.
"""

import zlib
from random import Random

# fmt: off
ONSETS = [
    "b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "cl",
    "dr", "fl", "gr", "kr", "pl", "st", "tr", "sh", "ch",
]
# fmt: on
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "io", "ou"]
CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "k", "x", "nd", "rt", "lm"]
SUFFIXES = ["Ltd", "Co", "GmbH", "Shop", "Cafe", "Inc", "AG", "Bros", "Mart", "Deli"]
# fmt: off
GOODS = [
    "Tea", "Milk", "Bread", "Eggs", "Rice", "Soap", "Salt", "Jam", "Fish", "Ham", "Corn", "Beans",
    "Sugar", "Apple", "Pear", "Plum", "Lime", "Water", "Juice", "Beer", "Wine", "Pen", "Paper", "Tape",
    "Glue", "Bolt", "Nail", "Wire", "Lamp", "Cable", "Chair", "Shirt", "Socks", "Brush", "Honey",
    "Flour", "Pasta", "Cheese", "Butter", "Coffee", "Onion", "Towel", "Candle", "Hammer",
]
# fmt: on
CAPITALS = "ABCDEFGHKLMNPRSTUVWXYZ"


def is_held_out(name: str) -> bool:
    """Whether training never shows `name` as a seller."""
    return zlib.crc32(name.encode()) % 2 == 1


def pseudo_word(rng: Random, max_letters: int) -> str:
    """A capitalised made-up word of 2 to `max_letters` letters."""
    word = ""
    wanted = rng.randint(2, max_letters)
    while len(word) < wanted:
        word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    return word[:wanted].capitalize()


def seller_name(rng: Random, max_letters: int, held_out: bool) -> str:
    """A seller of 4 to `max_letters` characters, from the held-out half of names or from the other one."""
    while True:
        name = pseudo_word(rng, min(max_letters, 10))
        suffix = rng.choice(SUFFIXES)
        if rng.random() < 0.5 and len(name) + 1 + len(suffix) <= max_letters:
            name = f"{name} {suffix}"
        if len(name) >= 4 and is_held_out(name) == held_out:
            return name


def goods(rng: Random, max_letters: int) -> str:
    """The name of something sold: half of them common words, half made up."""
    if rng.random() < 0.5:
        return rng.choice([word for word in GOODS if len(word) <= max_letters])
    return pseudo_word(rng, max_letters)


def amount(rng: Random, max_units: int) -> str:
    """A price, uniform in cents, from 1.00 to `max_units`.99."""
    cents = rng.randint(100, max_units * 100 + 99)
    return f"{cents // 100}.{cents % 100:02d}"


def date(rng: Random, dotted: bool) -> str:
    """A date, uniform over 2000 to 2029 (days 1 to 28): 2024-03-17, or 17.03.2024 when `dotted`."""
    year, month, day = rng.randint(2000, 2029), rng.randint(1, 12), rng.randint(1, 28)
    return f"{day:02d}.{month:02d}.{year}" if dotted else f"{year}-{month:02d}-{day:02d}"


def free_line(rng: Random, max_letters: int) -> str:
    """A line of a label or sign: a word, two words, a number, a price, a code or a date."""
    form = rng.random()
    if form < 0.35:
        return pseudo_word(rng, min(max_letters, 10))
    if form < 0.5 and max_letters >= 7:
        first = pseudo_word(rng, max_letters // 2)
        return f"{first} {pseudo_word(rng, max_letters - len(first) - 1)}"
    if form < 0.65:
        return str(rng.randint(0, 10 ** rng.randint(1, min(max_letters, 7)) - 1))
    if form < 0.8 and max_letters >= 5:
        price = amount(rng, 99 if max_letters < 8 else 999)
        return f"${price}" if rng.random() < 0.5 and max_letters > len(price) else price
    if form < 0.9 and max_letters >= 6:
        return f"{rng.choice(CAPITALS)}{rng.choice(CAPITALS)}-{rng.randint(10, 999)}"
    if max_letters >= 10:
        return date(rng, rng.random() < 0.5)
    return pseudo_word(rng, min(max_letters, 10)).upper()
