from dragoman.codecs.base64 import Base64Codec as Base64Codec
from dragoman.codecs.codec import CODECS as CODECS
from dragoman.codecs.codec import InputCodec as InputCodec
from dragoman.codecs.codec import RequestCodec as RequestCodec
from dragoman.codecs.datetime import DatetimeCodec as DatetimeCodec
from dragoman.codecs.image import PillowImageCodec as PillowImageCodec
from dragoman.codecs.json import JsonCodec as JsonCodec
from dragoman.codecs.json import PandasJsonCodec as PandasJsonCodec
from dragoman.codecs.numpy import NumpyCodec as NumpyCodec
from dragoman.codecs.numpy import NumpyRequestCodec as NumpyRequestCodec
from dragoman.codecs.pandas import PandasCodec as PandasCodec
from dragoman.codecs.string import StringCodec as StringCodec
from dragoman.codecs.string import StringRequestCodec as StringRequestCodec

__all__: list[str]
