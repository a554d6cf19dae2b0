"""Modules that kept processes import before they are forked: importing takes longer than most
trials."""

import torch
import transformers.modeling_utils
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import tests.zoo.trial
from tests.zoo import zoo
from tightfit.models import model_factory

torch.set_num_threads(1)
logging.set_verbosity_error()
zoo()
__all__ = ["AutoModelForCausalLM", "model_factory", "tests", "transformers"]
