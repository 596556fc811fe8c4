"""Settings of `make app`: who may come in, and what they can ask for. The folders that may be opened are confined in
multigrain.basics, by every function that opens a file. It has a folder of its own: JupyterLab would read it, too."""
import atexit, ipaddress, os, shutil, sys, tempfile
from pathlib import Path

from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.web import HTTPError
from voila.tornado import kernel_websocket_handler

MB, PROJECT = 2**20, Path(__file__).resolve().parents[3]

def is_local(address):
    "Can only this machine reach the address?"
    if address == 'localhost': return True
    try: return ipaddress.ip_address(address).is_loopback
    except ValueError: return False

def refused(address, token):
    "Why the app does not start; '' if it does."
    if token or is_local(address): return ''
    return (f'ADDRESS={address} can be reached by other machines, and TOKEN=0 lets everybody in: '
            'leave TOKEN=0 away, or ADDRESS')

def folders(text):
    "The folders that may be opened, in full; where none is named, the home of the sets and the store of runs."
    found = [os.path.abspath(os.path.expanduser(o)) for o in text.split(os.pathsep) if o]
    for o in found:
        if not os.path.isdir(o): sys.exit(f'ROOT={o} is not a folder: check the path')
    return os.pathsep.join(found or [str(PROJECT/'data'), os.environ.get('MULTIGRAIN_RUNS') or str(PROJECT/'runs')])

def read_header(message, read=kernel_websocket_handler.read_header_from_binary_message):
    "Voila takes every message for one of the newer protocol, and of an older one the start for a number to count to."
    return read(message) if int.from_bytes(message[:8], 'little') < 100 else None

class FewKernels(AsyncMappingKernelManager):
    "A kernel for each visitor, up to a number."
    most = int(os.environ.get('KERNELS') or 8)
    starting = 0
    async def start_kernel(self, *args, **kwargs):
        if len(self.list_kernel_ids()) + FewKernels.starting >= self.most:
            raise HTTPError(503, reason=f'{self.most} visitors are here already, please come back later')
        FewKernels.starting += 1
        try: return await super().start_kernel(*args, **kwargs)
        finally: FewKernels.starting -= 1

if 'c' in globals(): # read by Voila
    c = globals()['c']
    address = os.environ.get('ADDRESS') or '127.0.0.1'
    token = os.environ.get('TOKEN') != '0' # JUPYTER_TOKEN, if it is set, is the token
    if why := refused(address, token): sys.exit(why)
    os.environ['MULTIGRAIN_ONLY'] = folders(os.environ.get('MULTIGRAIN_ONLY', ''))
    c.Voila.ip, c.Voila.auto_token = address, token

    uploads = tempfile.mkdtemp(prefix='multigrain-app-') # each kernel has a folder in it, and removes it
    os.environ['MULTIGRAIN_TEMP'] = uploads
    atexit.register(shutil.rmtree, uploads, ignore_errors=True)

    kernel_websocket_handler.read_header_from_binary_message = read_header
    c.Voila.open_browser = False
    c.Voila.tornado_settings = dict(websocket_max_message_size=100*MB) # an upload is one message
    c.VoilaConfiguration.multi_kernel_manager_class = FewKernels
    c.MappingKernelManager.cull_idle_timeout = 1800 # seconds without a message
    c.MappingKernelManager.cull_interval = 60
    c.MappingKernelManager.cull_connected = True    # also of a page that somebody forgot to close

    c.VoilaConfiguration.classic_tree = True # its template, multigrain, lies beside this file
    c.VoilaConfiguration.allow_template_override = 'NO'
    c.VoilaConfiguration.file_allowlist = [] # notebooks are served, files are not
    c.VoilaConfiguration.show_tracebacks = False
