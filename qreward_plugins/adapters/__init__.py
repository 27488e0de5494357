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

from ..config import Groups, judges_in_charge, load_layers, parts_of, sources_of
from ..config.findings import did_you_mean
from ..config.load import ENVIRONMENT, colocated_sources, with_framework, without_colocated
from ..engine.process_portals import close_process_portals
from ..journal import Trained, TrainingLog
from ..judges import compares_siblings, refuse_comparing, refuse_parts, tells_steps
from ..judges import kind_of as judge_kind_of
from ..observers.facts import METRICS, flat_rate, summary
from ..samples import SCREENED, ResponseTurn, fits_float32
from ..samples.check import Unreadable, mapping_or_unreadable, name_or_unreadable, pictured, read_or_unreadable
from ..samples.images import Image, attach, is_image_part
from ..samples.messages import dialogue, messages_of
from ..scheduling.budgets import ENDS_RUN
from ..secrets import described_error, environment_secrets, secrets_in, with_secrets
from ..sources import LOGITS, VALUE, FunctionSource
from ..sources import kind_of as source_kind_of
from ..system.ray_actors import get_or_start as shared_actor
from ..system.ray_actors import in_ray_actor, ray_is_up
from .groups import KEEPS_OUT, RunningMeans, mean_of, number_of

__all__ = [
    "ENDS_RUN",
    "ENVIRONMENT",
    "KEEPS_OUT",
    "LOGITS",
    "SCREENED",
    "METRICS",
    "VALUE",
    "FunctionSource",
    "Groups",
    "Image",
    "ResponseTurn",
    "RunningMeans",
    "Trained",
    "TrainingLog",
    "Unreadable",
    "attach",
    "close_process_portals",
    "colocated_sources",
    "compares_siblings",
    "described_error",
    "dialogue",
    "did_you_mean",
    "environment_secrets",
    "fits_float32",
    "flat_rate",
    "in_ray_actor",
    "is_image_part",
    "judge_kind_of",
    "judges_in_charge",
    "load_layers",
    "mapping_or_unreadable",
    "mean_of",
    "messages_of",
    "name_or_unreadable",
    "number_of",
    "parts_of",
    "pictured",
    "ray_is_up",
    "read_or_unreadable",
    "refuse_comparing",
    "refuse_parts",
    "secrets_in",
    "shared_actor",
    "source_kind_of",
    "sources_of",
    "summary",
    "tells_steps",
    "with_framework",
    "with_secrets",
    "without_colocated",
]
