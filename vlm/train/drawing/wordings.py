"""The words of plausible documents: sellers, goods, dates in eight forms, money with and without currency."""

from collections.abc import Callable
from random import Random

from vlm.train.drawing import words

ABSENT = "not in the image"
TOTAL_WORDS = (
    *("Total", "Total", "Total", "TOTAL", "TOTAL:", "Total:", "Sum", "SUM", "Amount due", "Amount due:"),
    *("To pay", "To pay:", "Balance", "Grand total", "Total due"),
)
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
Money = Callable[[int, bool], str]
"""(cents, whether it carries its currency) to text."""


def seller(rng: Random, held_out: bool) -> str:
    """A made-up seller of one to three words, from the half of names that training shows or the other."""
    while True:
        name = words.pseudo_word(rng, 9)
        form = rng.random()
        if form < 0.35:
            name = f"{name} {rng.choice(words.SUFFIXES)}"
        elif form < 0.5:
            name = f"{name} {words.pseudo_word(rng, 8)}"
        elif form < 0.6:
            name = f"{name} & {rng.choice(['Co', 'Sons', words.pseudo_word(rng, 6)])}"
        elif form < 0.7:
            name = f"{name} {words.pseudo_word(rng, 6)} {rng.choice(words.SUFFIXES)}"
        elif form < 0.8:
            name = f"{name} {rng.choice(words.GOODS)}s"
        if rng.random() < 0.15:
            name = name.upper()
        if len(name) >= 4 and words.is_held_out(name) == held_out:
            return name


def goods(rng: Random) -> str:
    """Something sold, of one or two words."""
    name = words.goods(rng, 9)
    if rng.random() < 0.15:
        name = f"{name} {words.pseudo_word(rng, 6).lower()}"
    return name


def cents(rng: Random, units: int) -> int:
    """An amount in cents below `units` + 1, small ones and ones above a thousand now and then."""
    if units > 99 and rng.random() < 0.12:
        return rng.randint(100000, 999999)
    return rng.randint(50, units * 100 + 99) if rng.random() < 0.7 else rng.randint(50, units * 10 + 9)


def money_form(rng: Random) -> Money:
    """How one document writes money: a sign or a code before or after, thousands separated or not."""
    mark = rng.choice(["", "", "", "$", "$", "$", "EUR", "USD", "£", "€"])
    behind = mark in ("EUR", "USD", "€") and rng.random() < 0.6
    space = " " if len(mark) == 3 or (behind and rng.random() < 0.5) else ""
    comma = "," if rng.random() < 0.6 else ""

    def written(amount: int, marked: bool) -> str:
        units = f"{amount // 100:,}".replace(",", comma)
        plain = f"{units}.{amount % 100:02d}"
        if not mark or not marked:
            return plain
        return f"{plain}{space}{mark}" if behind else f"{mark}{space}{plain}"

    return written


def date(rng: Random) -> str:
    """A date from 2000 to 2029 in one of eight forms."""
    year, month, day = rng.randint(2000, 2029), rng.randint(1, 12), rng.randint(1, 28)
    name = MONTHS[month - 1]
    forms = (
        f"{year}-{month:02d}-{day:02d}",
        f"{day:02d}.{month:02d}.{year}",
        f"{day:02d}/{month:02d}/{year}",
        f"{month:02d}/{day:02d}/{year}",
        f"{day:02d}-{month:02d}-{year}",
        f"{day} {name[:3]} {year}",
        f"{day} {name} {year}",
        f"{name[:3]} {day}, {year}",
    )
    return rng.choice([forms[0], *forms])


def address(rng: Random) -> str:
    """A street or a telephone number."""
    if rng.random() < 0.6:
        street = rng.choice(["Street", "Road", "Lane", "street"])
        return f"{words.pseudo_word(rng, 8)} {street} {rng.randint(1, 99)}"
    return f"Tel {rng.randint(100, 999)} {rng.randint(1000, 9999)}"


def side_line(rng: Random, money: Money) -> tuple[str, str]:
    """An amount that is not the total."""
    word = rng.choice(["VAT", "Tax", "Subtotal", "Cash", "Card", "Discount"])
    return word, money(cents(rng, 99), False)


def thanks(rng: Random) -> str:
    """A line at a receipt's end."""
    return rng.choice(["Thank you!", "Thank you", "Paid by card", "Paid in cash", "See you soon"])


def line(rng: Random, letters: int) -> str:
    """A line of a label or a sign of at most `letters` characters, in capitals now and then."""
    form = rng.random()
    if form < 0.45 or letters < 8:
        text = words.free_line(rng, min(letters, 16))
    elif form < 0.8:
        parts = [words.pseudo_word(rng, 7) for _ in range(rng.randint(2, 3))]
        text = " ".join([parts[0], *(part if rng.random() < 0.4 else part.lower() for part in parts[1:])])
    elif form < 0.9:
        text = f"{rng.randint(1, 999)} {rng.choice(['g', 'kg', 'ml', 'mm', 'V', 'W', 'pcs'])}"
    else:
        text = f"{words.pseudo_word(rng, 8)} {rng.randint(1, 500)}{rng.choice(['', '%', '-B', ' A', '/7'])}"
    if len(text) > letters:
        text = text[:letters].strip()
    return text.upper() if rng.random() < 0.2 else text
