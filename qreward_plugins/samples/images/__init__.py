"""Images of prompts and responses, from data sets and trainers to the bodies of requests.

No image is trusted, and nothing here fetches a URL. An image is decoded and checked when its request is sent, in a
thread, and its encoding is dropped with the body. So a batch holds its images once, in the form in which the caller
gave them. Pillow decodes them; it is an optional dependency (the extra `images`) and imported on first use.
"""

from .encoded import EncodedImage as EncodedImage
from .encoded import images_in as images_in
from .image import Image as Image
from .image import attach as attach
from .image import is_empty_part as is_empty_part
from .image import is_image_part as is_image_part
from .image import remote_url as remote_url
from .pillow import EXTRA as EXTRA
from .pillow import has_pillow as has_pillow
from .pillow import is_picture as is_picture
