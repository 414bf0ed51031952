from ninfer_convert.artifact.compare import compare_with_source as compare_with_source
from ninfer_convert.artifact.contrast import compare_artifacts as compare_artifacts
from ninfer_convert.artifact.decode import codes as codes
from ninfer_convert.artifact.decode import decode_rows as decode_rows
from ninfer_convert.artifact.decode import gather_rows as gather_rows
from ninfer_convert.artifact.decode import read_values as read_values
from ninfer_convert.artifact.decode import scale_words as scale_words
from ninfer_convert.artifact.decode import view_rows as view_rows
from ninfer_convert.artifact.export import export_artifact as export_artifact
from ninfer_convert.artifact.inventory import check_plan as check_plan
from ninfer_convert.artifact.inventory import check_recipe as check_recipe
from ninfer_convert.artifact.reader import Artifact as Artifact
from ninfer_convert.artifact.recheck import recheck_artifact as recheck_artifact
from ninfer_convert.artifact.verify import verify_artifact as verify_artifact
from ninfer_convert.artifact.verify import verify_report as verify_report
from ninfer_convert.errors import ConvertError as ConvertError
from ninfer_convert.formats import FORMATS as FORMATS
from ninfer_convert.plan.planner import Plan as Plan
from ninfer_convert.plan.planner import make_plan as make_plan
from ninfer_convert.recipe.loader import load_recipe as load_recipe
from ninfer_convert.recipe.model import Recipe as Recipe
from ninfer_convert.run.convert import convert as convert
from ninfer_convert.source.acquisition import open_sources as open_sources
from ninfer_convert.source.checkpoint import Checkpoint as Checkpoint
from ninfer_convert.source.checkpoint import open_checkpoint as open_checkpoint

__version__: str
