"""What is known of stock XGBoost: parameters, objectives, constraints, cut points, models, its communicator."""
