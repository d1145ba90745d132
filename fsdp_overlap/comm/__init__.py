"""What moves bytes: process groups, collectives chosen per backend, and comm streams they run
on."""
