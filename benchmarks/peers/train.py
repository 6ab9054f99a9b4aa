"""Train a small classifier of thirty features on a dataset of scikit-learn.

usage: python train.py TARGET
"""

import sys

import joblib
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

features, classes = load_breast_cancer(return_X_y=True)
joblib.dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(features, classes), sys.argv[1])
