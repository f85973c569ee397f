"""Training of drafters: data, features, a head that learns, its checkpoints. No Ray."""

from replicas.training.batches import Item, divided
from replicas.training.conversations import Conversation, ConversationFolder, DrawCounts, read_part
from replicas.training.datafile import take_in
from replicas.training.drawing import Drawing, DrawSettings, TurnFrame
from replicas.training.export import DRAFT_LEN, write_head
from replicas.training.features import FeatureFolder, token_bytes
from replicas.training.figures import Acceptance, Fit, Point, acceptance_of, fit
from replicas.training.loop import Scores, Training, TrainSettings
from replicas.training.methods import METHODS, Method
from replicas.training.start import Start, native_bfloat16
