"""What tests share and is no test itself: ranks to run on, models, and twins to compare with."""
