"""Process groups, collectives chosen per backend, and the comm streams they run on."""
