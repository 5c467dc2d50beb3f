"""Small PDFs written by hand."""

from __future__ import annotations


def raw_pdf(
    content: str,
    media_box: str = "0 0 100 100",
    trailer: str = "",
    *,
    resources: str = "",
    page: str = "",
    more: tuple[str, ...] = (),
) -> bytes:
    """One page; `more` are objects from number 5 on."""
    box = f"/MediaBox [{media_box}]"
    return pdf_of(
        [
            "<< /Type /Catalog /Pages 2 0 R >>",
            "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            f"<< /Type /Page /Parent 2 0 R {box} /Contents 4 0 R /Resources << {resources} >> {page} >>",
            stream(content),
            *more,
        ],
        trailer,
    )


def stream(content: str) -> str:
    return f"<< /Length {len(content)} >>\nstream\n{content}\nendstream"


def pdf_of(objects: list[str], trailer: str = "") -> bytes:
    """Objects from number 1 on; the first is the catalog."""
    out, offsets = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    return (
        f"{out}xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R {trailer}>>\n"
        f"startxref\n{len(out)}\n%%EOF\n"
    ).encode()
