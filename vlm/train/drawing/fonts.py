"""The two font families of the model's domain, found where Debian or matplotlib put them."""

from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

FAMILIES = {"sans": "DejaVuSans-Bold.ttf", "mono": "DejaVuSansMono-Bold.ttf"}
FURTHER = {
    "sans-regular": "DejaVuSans.ttf",
    "mono-regular": "DejaVuSansMono.ttf",
    "serif-regular": "DejaVuSerif.ttf",
    "serif-bold": "DejaVuSerif-Bold.ttf",
}
"""Training draws these too; the domain that is measured is of FAMILIES."""
DEBIAN_FOLDER = Path("/usr/share/fonts/truetype/dejavu")


@cache
def font_path(family: str) -> Path:
    """The file of a family of FAMILIES or FURTHER. Raises FileNotFoundError where neither source has it."""
    name = (FAMILIES | FURTHER)[family]
    folders = []
    spec = find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf")
    folders.append(DEBIAN_FOLDER)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"the font {name} is missing: pip install 'vlm-serve[train]', or Debian's fonts-dejavu-core"
    )


@lru_cache(maxsize=512)
def font(family: str, size: int) -> ImageFont.FreeTypeFont:
    """`family` at `size` px, laid out by FreeType alone, so that every machine draws the same."""
    return ImageFont.truetype(str(font_path(family)), size, layout_engine=ImageFont.Layout.BASIC)
