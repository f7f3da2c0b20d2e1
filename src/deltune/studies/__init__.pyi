from .choosing import Choice as Choice
from .choosing import choose as choose
