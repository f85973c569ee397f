"""Tools that a call offers, and the calls of them in its answer."""

from cluster.frontend.tools.detection import tool_format
from cluster.frontend.tools.formats import AUTO, TOOL_FORMATS, ToolFormat
from cluster.frontend.tools.reader import CallDelta, ToolCall, ToolReader
from cluster.frontend.tools.structure import tool_structure
from cluster.frontend.tools.use import (
    CalledFunction,
    CallTurn,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
    ToolUse,
    json_object,
)
