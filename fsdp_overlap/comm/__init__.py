"""What moves bytes: process groups, collectives chosen per backend, and lanes they run on."""
