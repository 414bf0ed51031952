from ninfer_convert.compare import compare_with_source as compare_with_source
from ninfer_convert.contrast import compare_artifacts as compare_artifacts
from ninfer_convert.decode import codes as codes
from ninfer_convert.decode import decode_rows as decode_rows
from ninfer_convert.decode import gather_rows as gather_rows
from ninfer_convert.decode import read_values as read_values
from ninfer_convert.decode import scale_words as scale_words
from ninfer_convert.decode import view_rows as view_rows
from ninfer_convert.errors import ConvertError as ConvertError
from ninfer_convert.export import export_artifact as export_artifact
from ninfer_convert.formats import FORMATS as FORMATS
from ninfer_convert.inventory import check_plan as check_plan
from ninfer_convert.inventory import check_recipe as check_recipe
from ninfer_convert.plan import Plan as Plan
from ninfer_convert.plan import make_plan as make_plan
from ninfer_convert.reader import Artifact as Artifact
from ninfer_convert.recheck import recheck_artifact as recheck_artifact
from ninfer_convert.recipe import Recipe as Recipe
from ninfer_convert.recipe_loader import load_recipe as load_recipe
from ninfer_convert.source import Checkpoint as Checkpoint
from ninfer_convert.source import open_checkpoint as open_checkpoint
from ninfer_convert.verify import verify_artifact as verify_artifact
from ninfer_convert.verify import verify_report as verify_report

__version__: str
