from .config import ServeConfig as ServeConfig
from .engine.server import Server as Server
