"""Between XGBoost and the federation: catalogue, mediator, frames, protected sums, evidence."""
