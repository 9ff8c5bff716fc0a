"""The papers behind adapters and networks whose members share weights, cited by key."""

from shoal.core.citation import Citation

__all__ = ["NETWORKS"]

NETWORKS: dict[str, Citation] = {
    "hu2021lora": Citation(
        "Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi "
        "and Wang, Shean and Wang, Lu and Chen, Weizhu",
        "LoRA: Low-Rank Adaptation of Large Language Models",
        2021,
        "arXiv",
        "https://arxiv.org/abs/2106.09685",
    ),
    "muhlematter2024lora": Citation(
        "Muhlematter, Dominik J. and Halbheer, Michelle and Becker, Alexander and "
        "Narnhofer, Dominik and Aasen, Helge and Schindler, Konrad and Turkoglu, Mehmet Ozgur",
        "LoRA-Ensemble: Efficient Uncertainty Modelling for Self-Attention Networks",
        2024,
        "arXiv",
        "https://arxiv.org/abs/2405.14438",
    ),
    "liu2022few": Citation(
        "Liu, Haokun and Tam, Derek and Muqeeth, Mohammed and Mohta, Jay and Huang, Tenghao and "
        "Bansal, Mohit and Raffel, Colin",
        "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning",
        2022,
        "Advances in Neural Information Processing Systems",
        "https://arxiv.org/abs/2205.05638",
    ),
    "wen2020batchensemble": Citation(
        "Wen, Yeming and Tran, Dustin and Ba, Jimmy",
        "BatchEnsemble: An Alternative Approach to Efficient Ensemble and Lifelong Learning",
        2020,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/2002.06715",
    ),
    "dusenberry2020efficient": Citation(
        "Dusenberry, Michael W. and Jerfel, Ghassen and Wen, Yeming and Ma, Yi-An and "
        "Snoek, Jasper and Heller, Katherine and Lakshminarayanan, Balaji and Tran, Dustin",
        "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors",
        2020,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/2005.07186",
    ),
    "gorishniy2024tabm": Citation(
        "Gorishniy, Yury and Kotelnikov, Akim and Babenko, Artem",
        "TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling",
        2024,
        "arXiv",
        "https://arxiv.org/abs/2410.24210",
    ),
    "lee2015m": Citation(
        "Lee, Stefan and Purushwalkam, Senthil and Cogswell, Michael and Crandall, David and "
        "Batra, Dhruv",
        "Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks",
        2015,
        "arXiv",
        "https://arxiv.org/abs/1511.06314",
    ),
    "dosovitskiy2021image": Citation(
        "Dosovitskiy, Alexey and Beyer, Lucas and Kolesnikov, Alexander and others",
        "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
        2021,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/2010.11929",
    ),
}
