"transitional shim"
from .image import *
from .sets import *
from .readers import *
from .download import *
from .basics import atomic_write as _whole, plural as _n
from .sets import file_stamp as _stat
