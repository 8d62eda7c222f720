"""Request bodies of all APIs: schemas, JSON decoding, and the sampling parameters, options and grammar in them."""
