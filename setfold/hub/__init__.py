"""Models on the Hugging Face Hub. It needs the package huggingface_hub.

>>> from setfold.hub import from_pretrained, push_to_hub, save_pretrained
"""

from setfold.hub.api import from_pretrained as from_pretrained
from setfold.hub.api import push_to_hub as push_to_hub
from setfold.hub.api import save_pretrained as save_pretrained
