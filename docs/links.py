"""A hook of mkdocs: links that leave docs/, right in a checkout, become plain text on the site."""

import posixpath
import re


def on_page_markdown(markdown: str, page, **_) -> str:
    """Keep the text of each link to a file outside the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("..") else link[0]

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]*)\)", replace, markdown)
