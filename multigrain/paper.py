"transitional shim"
from .page import html_page
