"""What a row's new text must be, and where it is in that. Imports no torch: a frontend checks
grammars in small processes of their own."""

from replicas.grammars.grammar import Grammars, grammar_of
from replicas.grammars.state import GrammarError, GrammarState, Mask, Walk
from replicas.grammars.threads import PATIENT_S, RowGrammar, walks
