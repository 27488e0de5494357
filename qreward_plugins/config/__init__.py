"""The configuration: one tree of sources, judges, routes and engine settings, read and checked as a whole.

`load_config` reads it, and reports all mistakes at once, each with its place. A trainer takes minutes to start, so
reporting one mistake per start would cost a user much time.
"""

from __future__ import annotations

from .load import load_config as load_config
from .load import load_layers as load_layers
from .models import AskingConfig as AskingConfig
from .models import Config as Config
from .models import Constant as Constant
from .models import FailurePolicy as FailurePolicy
from .models import Groups as Groups
from .models import JournalConfig as JournalConfig
from .models import JudgeConfig as JudgeConfig
from .models import Route as Route
from .models import Scheduling as Scheduling
from .models import Strategy as Strategy
from .names import configured_name as configured_name
from .names import judge_for as judge_for
from .names import judges_asked as judges_asked
from .names import judges_in_charge as judges_in_charge
from .names import own_sources as own_sources
from .names import parts_of as parts_of
from .names import routes_of as routes_of
from .names import sources_for_model as sources_for_model
from .names import sources_of as sources_of
from .source_models import Batch as Batch
from .source_models import EndpointConfig as EndpointConfig
from .source_models import Limits as Limits
from .source_models import Price as Price
from .source_models import SourceConfig as SourceConfig
from .yaml_file import read_yaml as read_yaml
