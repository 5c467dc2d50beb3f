"""Fonts: the two of the model's narrow domain, and the families plausible documents are drawn in."""

from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

FAMILIES = {"sans": "DejaVuSans-Bold.ttf", "mono": "DejaVuSansMono-Bold.ttf"}
PLAUSIBLE = {
    "dejavu-sans": ("DejaVuSans", "DejaVuSans-Bold"),
    "dejavu-mono": ("DejaVuSansMono", "DejaVuSansMono-Bold"),
    "dejavu-serif": ("DejaVuSerif", "DejaVuSerif-Bold"),
    "dejavu-condensed": ("DejaVuSansCondensed", "DejaVuSansCondensed-Bold"),
    "liberation-sans": ("LiberationSans-Regular", "LiberationSans-Bold"),
    "liberation-mono": ("LiberationMono-Regular", "LiberationMono-Bold"),
    "liberation-serif": ("LiberationSerif-Regular", "LiberationSerif-Bold"),
    "liberation-narrow": ("LiberationSansNarrow-Regular", "LiberationSansNarrow-Bold"),
    "free-sans": ("FreeSans", "FreeSansBold"),
    "free-mono": ("FreeMono", "FreeMonoBold"),
    "free-serif": ("FreeSerif", "FreeSerifBold"),
    "noto-sans": ("NotoSans-Regular", "NotoSans-Bold"),
    "noto-mono": ("NotoSansMono-Regular", "NotoSansMono-Bold"),
    "noto-serif": ("NotoSerif-Regular", "NotoSerif-Bold"),
    "roboto": ("Roboto-Regular", "Roboto-Bold"),
    "roboto-condensed": ("RobotoCondensed-Regular", "RobotoCondensed-Bold"),
    "open-sans": ("OpenSans-Regular", "OpenSans-Bold"),
    "carlito": ("Carlito-Regular", "Carlito-Bold"),
    "hack": ("Hack-Regular", "Hack-Bold"),
}
"""Families of plausible documents: (regular, bold). Those that are installed are drawn."""
HELD_OUT = {
    "lato": ("Lato-Regular", "Lato-Bold"),
    "anonymous-pro": ("Anonymous Pro", "Anonymous Pro B"),
}
"""Families that training never draws."""
PACKAGES = (
    "fonts-dejavu-core fonts-dejavu-extra fonts-liberation fonts-freefont-ttf fonts-noto-core"
    " fonts-noto-mono fonts-roboto-unhinted fonts-open-sans fonts-crosextra-carlito fonts-hack fonts-lato"
    " fonts-anonymous-pro"
)
DEBIAN_FOLDER = Path("/usr/share/fonts/truetype")


def _matplotlib_folder() -> Path | None:
    spec = find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


@cache
def _installed() -> dict[str, Path]:
    """TrueType files by name without ending; matplotlib's copies go before Debian's."""
    folders = [DEBIAN_FOLDER, _matplotlib_folder()]
    found = [path for folder in folders if folder is not None for path in sorted(folder.rglob("*.ttf"))]
    return {path.stem: path for path in found}


@cache
def plausible_families(held_out: bool) -> tuple[str, ...]:
    """The installed families of HELD_OUT or PLAUSIBLE; plain DejaVu is always among the latter.

    Raises FileNotFoundError where no such family is installed.
    """
    wanted = HELD_OUT if held_out else PLAUSIBLE
    found = tuple(name for name, faces in wanted.items() if set(faces) <= _installed().keys())
    if not found:
        raise FileNotFoundError(f"no font of {', '.join(wanted)} is installed; Debian's are {PACKAGES}")
    return found


@lru_cache(maxsize=2048)
def plausible_font(family: str, bold: bool, size: int) -> ImageFont.FreeTypeFont:
    """A face of PLAUSIBLE or HELD_OUT at `size` px."""
    path = _installed()[(PLAUSIBLE | HELD_OUT)[family][bold]]
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def font_path(family: str) -> Path:
    """The file of a family of FAMILIES. Raises FileNotFoundError where it is not installed."""
    name = FAMILIES[family]
    if Path(name).stem in _installed():
        return _installed()[Path(name).stem]
    raise FileNotFoundError(
        f"the font {name} is missing: pip install 'vlm-serve[train]', or Debian's fonts-dejavu-core"
    )


@lru_cache(maxsize=512)
def font(family: str, size: int) -> ImageFont.FreeTypeFont:
    """`family` at `size` px, laid out by FreeType alone, so that every machine draws the same."""
    return ImageFont.truetype(str(font_path(family)), size, layout_engine=ImageFont.Layout.BASIC)
