"""Tables of well-known machines and models: data sheets and layers. Measurements replace them."""
