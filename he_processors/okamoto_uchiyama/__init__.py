"""The Okamoto-Uchiyama cryptosystem (Eurocrypt 1998): the faster second scheme.

Security: semantic security rests on the p-subgroup assumption for n = p^2 q, which implies that n cannot be factored.
    Caution: a party that can make the key owner decrypt a value of p or more, and see the result, learns p. The scheme
    is for honest-but-curious parties only, with the packing layout's spare bits checked on every decryption. It is not
    in ISO/IEC 18033-6. Paillier is the default.
"""
