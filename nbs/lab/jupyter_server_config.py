"Settings of `make lab`, for this project alone: notebooks are cleaned when they are saved, uploads may be large."
import os
from pathlib import Path

WIDGET = 'application/vnd.jupyter.widget-view+json'

def clean_on_save(model, path='', **_):
    "What nbdev_clean does, and no widgets: a view without its kernel is an empty box."
    if model['type'] != 'notebook' or model['content']['nbformat'] != 4: return
    from nbdev.clean import clean_jupyter
    clean_jupyter(str(Path(os.environ.get('MULTIGRAIN_ROOT', '.'))/'nbs'), model)
    model['content']['metadata'].pop('widgets', None)
    for cell in model['content']['cells']:
        if 'outputs' in cell: cell['outputs'] = [o for o in cell['outputs'] if WIDGET not in o.get('data', {})]

if 'c' in globals(): # read by Jupyter
    c.ContentsManager.pre_save_hook = clean_on_save # noqa: F821
    c.LabApp.news_url = None # noqa: F821  no question on the first start
    c.ServerApp.tornado_settings = {'websocket_max_message_size': 100*2**20} # noqa: F821  an upload is one message
