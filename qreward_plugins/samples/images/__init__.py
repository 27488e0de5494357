"""Images of prompts and responses, from data sets and trainers to the bodies of requests.

No image is trusted, and nothing here fetches a URL. An image is decoded and checked when its request is sent, in a
thread, and its encoding is dropped with the body. So a batch holds its images once, in the form in which the caller
gave them. Pillow decodes them; it is an optional dependency (the extra `images`) and imported on first use.
"""

from .encoded import EncodedImage, images_in
from .image import Image, attach, is_empty_part, is_image_part, remote_url
from .pillow import EXTRA, has_pillow, is_picture

__all__ = [
    "EXTRA",
    "EncodedImage",
    "Image",
    "attach",
    "has_pillow",
    "images_in",
    "is_empty_part",
    "is_image_part",
    "is_picture",
    "remote_url",
]
