"""Gradient-based meta-learning that shares gradients between tasks."""
from gradshare.algorithms import *
from gradshare.backbones import Conv4
from gradshare.controls import *
from gradshare.episodes import *
from gradshare.learner import *
from gradshare.sharing import GradientSharing
