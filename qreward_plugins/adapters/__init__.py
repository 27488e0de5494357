"""What an adapter for a training framework takes beside the names of `qreward_plugins`. Ours import nothing else.

- Settings: `load_layers` reads the configuration from the framework's own tree, with a file below it; `ENVIRONMENT` is
  the variable that may name the file. `with_framework` fills in addresses that only the framework has, and keeps them
  on a reload. `without_colocated` refuses `colocated_sources`, where the phases of a training are not known.
  `judges_in_charge`, `parts_of`, `sources_of`, `judge_kind_of` and `source_kind_of` find what a configuration uses;
  `compares_siblings` says whether a judge needs a whole group, and `refuse_comparing` refuses one; `refuse_parts`
  refuses judges of turns and rewards in parts, and `tells_steps` says whether a judge has any. `did_you_mean`
  suggests a name for a misspelt one.
- Rollouts: `messages_of` and `attach` make messages of prompts and images, and `pictured` makes a sample's fields of
  these; `dialogue` makes turns of messages (`ResponseTurn`). `read_or_unreadable` and those like it read foreign
  values; what raises is an `Unreadable`, which fails its own sample only.
- Groups: `number_of` is the number that an outcome trains as; `KEEPS_OUT` has the policies for which it may be none.
  `mean_of` and `RunningMeans` give a failed sample the mean of its siblings. `fits_float32`: whether a trainer can hold
  a number. `ENDS_RUN` is the reason of a failure that ends the run. `shared_actor` is an actor of the Ray job;
  `in_ray_actor` says whether this process is one.
- Reports: `summary` makes metrics of the facts of outcomes, which an engine's `facts()` makes.
  `TrainingLog` records what the trainer made of rewards (`Trained`) in the journal.
- Secrets: `described_error`, `environment_secrets`, `secrets_in` and `with_secrets` keep them out of logs.
"""

from __future__ import annotations

from .. import judges, sources
from ..config import Groups as Groups
from ..config import judges_in_charge as judges_in_charge
from ..config import load_layers as load_layers
from ..config import parts_of as parts_of
from ..config import sources_of as sources_of
from ..config.findings import did_you_mean as did_you_mean
from ..config.load import ENVIRONMENT as ENVIRONMENT
from ..config.load import colocated_sources as colocated_sources
from ..config.load import with_framework as with_framework
from ..config.load import without_colocated as without_colocated
from ..engine.process_portals import close_process_portals as close_process_portals
from ..journal import Trained as Trained
from ..journal import TrainingLog as TrainingLog
from ..judges import compares_siblings as compares_siblings
from ..judges import refuse_comparing as refuse_comparing
from ..judges import refuse_parts as refuse_parts
from ..judges import tells_steps as tells_steps
from ..observers.facts import METRICS as METRICS
from ..observers.facts import flat_rate as flat_rate
from ..observers.facts import summary as summary
from ..quotas.budgets import ENDS_RUN as ENDS_RUN
from ..samples import SCREENED as SCREENED
from ..samples import ResponseTurn as ResponseTurn
from ..samples import fits_float32 as fits_float32
from ..samples.check import Unreadable as Unreadable
from ..samples.check import mapping_or_unreadable as mapping_or_unreadable
from ..samples.check import name_or_unreadable as name_or_unreadable
from ..samples.check import pictured as pictured
from ..samples.check import read_or_unreadable as read_or_unreadable
from ..samples.images import Image as Image
from ..samples.images import attach as attach
from ..samples.images import is_image_part as is_image_part
from ..samples.messages import dialogue as dialogue
from ..samples.messages import messages_of as messages_of
from ..secrets import described_error as described_error
from ..secrets import environment_secrets as environment_secrets
from ..secrets import secrets_in as secrets_in
from ..secrets import with_secrets as with_secrets
from ..sources import LOGITS as LOGITS
from ..sources import VALUE as VALUE
from ..sources import FunctionSource as FunctionSource
from ..system import ray_actors
from ..system.ray_actors import in_ray_actor as in_ray_actor
from ..system.ray_actors import ray_is_up as ray_is_up
from .groups import KEEPS_OUT as KEEPS_OUT
from .groups import RunningMeans as RunningMeans
from .groups import mean_of as mean_of
from .groups import number_of as number_of

judge_kind_of, source_kind_of = judges.kind_of, sources.kind_of
shared_actor = ray_actors.get_or_start
